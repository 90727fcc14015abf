"""Profiles measured from a run's record."""
