"""The machinery that runs plans: drivers, shared calls, waiting consumers, lease renewal."""
