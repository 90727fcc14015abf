"""Prompts, trajectories, groups and batches; where prompts come from; how trajectories become batches."""
