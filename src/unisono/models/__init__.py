"""The built-in computation models; each is reached by its name in the registry's table only."""
