"""Schedules: documents that push a message at each of their ticks, without a leader.

``timing`` computes the ticks, ``definitions`` checks and reads a stored schedule, ``managing``
changes it, and ``ticking`` pushes the messages.
"""
