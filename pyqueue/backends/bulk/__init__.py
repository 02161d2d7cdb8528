"""Writes and reads of many documents, for Spark."""
