"""The data process: what is played next, what was played, what is trained on.

service    sockets and time: `run(config, stop)`
ledger     every transition of a trajectory, in memory and in the store, in one place
groups     the live groups and their leases, in memory
scheduler  which trajectory to play next
curate     what is trained on and why (pure)
progress   success, throughput and staleness as they happen
store      the only code that knows SQLite     migrations  its schema     rows, blobs  what it holds
"""
