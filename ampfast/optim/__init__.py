"""Optimizers as a scaler sees them, their master weights and schedules."""
