"""Buckets: queues that store many messages in one document."""
