"""The pipeline on a virtual clock: simulated machinery behind the real protocols, and the planner that it makes."""
