"""The machinery that runs plans: drivers, shared calls, waiting consumers, renewal of leases."""
