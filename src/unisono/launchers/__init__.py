"""Launchers of replicas; each is reached by its name in the registry only."""
