"""The data role: what is played next, what was played, what is trained on. Files: README.md here.

service    the process: sockets and time, `run(config, stop)`
ledger     every transition of a trajectory, a group and a batch
store      the only code that knows SQLite
exchange   trajectories leave and enter runs as Parquet files
"""
