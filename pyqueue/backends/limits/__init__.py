"""Limits of queues: how many messages are held at a time, and how many start per period."""
