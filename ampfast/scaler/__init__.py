"""The gradient scaler, its state, its steps and its guard."""
