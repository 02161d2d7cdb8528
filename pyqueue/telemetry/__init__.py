"""Telemetry: figures about queues, which clients count by hooks and store beside the queues."""
