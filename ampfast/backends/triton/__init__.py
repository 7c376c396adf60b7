"""Kernels written in Triton; importing this package imports triton."""
