"""Encoding of Python values as bytes and tensors."""
