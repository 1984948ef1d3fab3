"""Benchmarks of a whole run: real processes, real bus and database, simulated GUIs and GPUs."""
