"""What workers of one machine share: processes, memory files, token files, batches."""
