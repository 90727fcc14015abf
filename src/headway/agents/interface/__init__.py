"""Interface between a program and its episode."""
