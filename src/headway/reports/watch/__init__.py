"""``headway watch``: a run's page, kept up to date from the files of its directory, and served on loopback."""
