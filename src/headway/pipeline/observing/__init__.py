"""Observers of a run: guards, troubles, the profile window."""
