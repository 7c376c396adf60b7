"""Norms of gradients, and what is decided by them."""
