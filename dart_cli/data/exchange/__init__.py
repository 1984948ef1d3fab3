"""Trajectories leave and enter runs, as Parquet files.

transfer         a run -> a folder, a folder -> the pool of a run
parquet_schema   the columns, and a trajectory as it travels
parquet_write    trajectories -> files
parquet_read     files -> trajectories, every field checked
"""
