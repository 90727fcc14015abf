"""Attention over packed lines, on one rank and divided over ranks."""
