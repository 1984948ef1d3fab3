"""`dart env`: slots that lease tasks, play episodes and hand trajectories in.

worker           the process and its slots: lease, play, submit, repeat
episode          one episode: reset -> (ask the policy -> parse its text -> act) ... -> verdict
peers            what it is connected with: telemetry, data, rollout workers
data_client      leases and hand-ins; waits while data is away
router           chooses a rollout worker for each request, and another one if it fails
async_env        an environment called from an event loop, whose episodes a second model may judge, too, or alone
carriers         its calls carried by a thread, or by a process that can be killed, with a deadline on every call
child            that process, and the frames to it
calls            one call to an environment, its answer checked against the contract
"""
