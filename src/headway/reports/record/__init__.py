"""Writing and reading of a run's record, its events on disk."""
