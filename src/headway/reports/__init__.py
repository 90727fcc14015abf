"""Reports on a run: everything here is derived from `headway.events` and from nothing else."""
