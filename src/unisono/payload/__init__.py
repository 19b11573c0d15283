"""Python values as bytes and tensors, and back."""
