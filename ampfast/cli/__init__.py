"""Commands of `python -m ampfast`."""
