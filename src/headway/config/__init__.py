"""Configuration: schema, loading, modes, placement and the doctor. Imports neither torch nor ray."""
