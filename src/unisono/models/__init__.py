"""Built-in computation models, imported only by name from the registry's table."""
