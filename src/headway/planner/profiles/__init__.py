"""Profiles: what a job costs, in numbers that a simulation can use."""
