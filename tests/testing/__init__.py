"""Tests of ``pyqueue.testing``. They run in memory and, unchanged, on a server."""
