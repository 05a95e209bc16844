"""Load the model, attach adapters, and compute the loss."""
