"""What a run tells: everything here is derived from `headway.events` and from nothing else."""
