"""Cluster that runs the roles: on Ray with one actor per rank, or all in this process. Both run the same engines."""
