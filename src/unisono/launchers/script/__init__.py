"""Ranks that run a script."""
