"""Cluster where roles live: on Ray, one actor per rank, or all in this process. Engines are the same on both."""
