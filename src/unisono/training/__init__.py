"""Helpers that training repositories copy from each other, on every model."""
