"""Arithmetic over sizes: memory, devices, placement and time limits."""
