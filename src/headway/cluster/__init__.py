"""Where the roles live: on Ray, one actor per rank, or all in this process. The pipeline sees the same engines."""
