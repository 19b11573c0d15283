"""How replicas come to exist; each launcher is reached by its name in the registry only."""
