"""Simulated machinery behind the pipeline's protocols, on a virtual clock."""
