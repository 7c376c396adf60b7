"""Triton kernels; importing this package imports triton."""
