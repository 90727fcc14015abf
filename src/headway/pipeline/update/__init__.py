"""The parameter update: transfer, loading, pauses, and the pool of receivers."""
