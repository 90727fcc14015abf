"""Parts for the workers of one machine: process set-up, token files, cached batches."""
