"""``mpiexec``."""
