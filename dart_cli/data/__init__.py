"""The data process: what is played next, what was played, what is trained on. See README.md here.

service        sockets and time: `run(config, stop)`
lease_queue    environment slots that wait for a lease
sync_queue     rollout workers that wait for their turn to take new weights
group_commit   many requests share one transaction
worker_watch   which processes live; takes back what dead ones held
ledger         every transition of a trajectory, in memory and in the store
groups         the live groups and their leases, in memory
leasing        new groups and leases: size, step limit, seeds
scheduler      which trajectory to play next
step_checks    whether a message from an environment is consistent
batching       batches: formed, served again until trained on
curate         what is trained on and why (pure)
pool           past successes that join groups which failed
restore        the ledger's memory, read from the store at a start
permits        which rollout worker takes new weights when, and what each serves
progress       success by task and version, throughput, metrics as they happen
usage          where the time of the run's processes goes
overview       the run at one moment, for the status page
stall_monitor  what data knows of a stall     stall_rules  which waits are stalls, and the cure
store          the only code that knows SQLite
exchange       trajectories leave and enter runs as Parquet files
"""
