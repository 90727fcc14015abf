"""Reports on a run, derived only from `headway.events`."""
