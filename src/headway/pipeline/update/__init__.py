"""The parameter update: transfer, loading, pauses, and who takes part."""
