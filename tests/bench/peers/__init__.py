"""Queues of other projects beside pyqueue. ``section`` runs them, ``servers`` starts their servers.

Each peer is a small program that uses its queue as the documentation of the queue says. ``program``
has what the programs in Python share, and describes what they read and print.
"""
