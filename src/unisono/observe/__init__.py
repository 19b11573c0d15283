"""Observability: the current calls of ranks, their waits, and traces of a job."""
