"""Checks of a whole configuration, and what they say."""
