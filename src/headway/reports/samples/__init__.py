"""Samples: what drawn groups and held-out problems said, and how tokens are coloured."""
