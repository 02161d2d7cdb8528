"""What tests of several folders share: waiting, processes, servers, the ledger, the proxy."""
