"""``headway profile``: a profile is fitted to a run's record."""
