"""The data process: what is played next, what was played, what is trained on.

service    sockets and time: `run(config, stop)`
ledger     every transition of a trajectory, in memory and in the store, in one place
groups     the live groups and their leases, in memory
scheduler  which trajectory to play next
curate     what is trained on and why (pure)
permits    which rollout worker takes new weights when, and what each serves
progress   success by task and version, throughput, metrics as they happen
usage      where the time of the run's processes goes
overview   the run at one moment, for the status page
store      the only code that knows SQLite     migrations  its schema     rows, blobs  what it holds
"""
