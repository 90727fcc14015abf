"""Timelines: a run as lanes on one time axis, as a page and as a trace."""
