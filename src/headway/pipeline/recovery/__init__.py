"""Recovery: checkpoints, liveness, and replacements for workers that are gone."""
