"""Ordered queues: the messages of a group are received one after the other."""
