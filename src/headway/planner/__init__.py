"""``headway plan``: the real pipeline on a virtual clock, with simulated engines behind its protocols."""
