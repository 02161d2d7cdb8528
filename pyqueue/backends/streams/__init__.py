"""Streams: logs that each consumer group reads at its own position."""
