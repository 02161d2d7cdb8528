"""Queues with priorities."""
