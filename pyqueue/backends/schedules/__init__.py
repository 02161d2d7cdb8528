"""Schedules: each pushes a message at certain times, its ticks. No process is a leader.

``timing`` computes the ticks, ``definitions`` checks and reads a stored schedule, ``managing``
changes it, and ``ticking`` pushes the messages.
"""
