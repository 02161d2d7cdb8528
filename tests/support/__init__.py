"""Helpers of tests in several folders: waiting, processes, servers, the ledger, the proxy."""
