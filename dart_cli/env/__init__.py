"""`dart env`: slots that lease tasks, play episodes and submit trajectories.

worker           the process and its slots: lease, play, submit, repeat
episode          one episode: reset -> (ask the policy -> parse its text -> act) ... -> verdict
step_prompts     the prompts of an episode: what each shows of earlier steps
peers            the connections of the process: telemetry, the data service, rollout workers
data_client      requests to the data service: leases, steps, ends; it waits while the service is absent
router           chooses a rollout worker for each request, and another one if that fails
async_env        an environment that is called from an event loop; a second model (the judge) may judge its
                 episodes
carriers         carries calls to an environment, in a thread or a process, with a deadline on each call
child            the program of such a process, and the frames that it reads and writes
calls            performs one call to an environment and checks the answer against the contract
"""
