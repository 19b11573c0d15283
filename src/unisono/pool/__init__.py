"""Warm replicas that run many functions."""
