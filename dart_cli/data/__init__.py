"""The data service: what is played next, what was played, what is trained on. README.md here lists the files.

service    the process: sockets, handlers and housekeeping, `run(config, stop)`
ledger     makes every transition of a trajectory, a group and a batch
next_batch forms the trainer's next batch
store      reads and writes the run's database
exchange   writes and reads trajectories as Parquet files
"""
