"""PyTorch/XLA."""
