"""Prompts, trajectories, groups and batches; sources of prompts; batching of trajectories."""
