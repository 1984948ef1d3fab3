"""Export trajectories of runs to Parquet files, and import them into other runs.

transfer         exports a run to a folder, and imports a folder into the pool of a run
parquet_schema   the columns of the files, and the type of a trajectory that is exported or imported
parquet_write    writes trajectories to files
parquet_read     reads trajectories from files and checks every field
"""
