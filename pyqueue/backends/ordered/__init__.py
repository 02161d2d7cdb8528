"""Ordered queues: the messages of a group are received one at a time, in order."""
