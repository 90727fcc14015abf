"""Shared by workers of one machine: processes, memory files, token files, batches."""
