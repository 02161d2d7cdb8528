"""Limits of queues on the messages held at a time, and on the messages started per period."""
