"""Measurements of ampfast against torch: `python -m benchmarks`, both sides in one run."""
