"""Pictures of a run, each drawn from numbers that are written beside it."""
