"""Named claims: many messages that one process of a group holds, for Spark."""
