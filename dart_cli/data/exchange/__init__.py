"""Trajectories leave and enter runs, as parquet files."""
