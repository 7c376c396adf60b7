"""Where gradients or outputs went wrong, by parameter and by module."""
