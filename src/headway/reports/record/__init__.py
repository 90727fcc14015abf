"""A run's record on disk: events, written and read."""
