"""Queues of other projects beside pyqueue. ``section`` runs them, ``servers`` starts their servers.

Each peer is a small program that uses its queue as the documentation of the queue says. ``program``
has the shared part of the programs in Python, and describes their input and output.
"""
