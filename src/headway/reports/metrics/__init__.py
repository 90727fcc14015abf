"""Figures from events: metrics, sums, occupancy and the summary of a run."""
