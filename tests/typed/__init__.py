"""A program whose types are all known, for type checkers."""
