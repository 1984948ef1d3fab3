"""`dart data collect`: successes of the training tasks, for the experience pool.

collect    the verb: plays, keeps the successes in the pool or a folder, prints a table
quotas     how many successes of which tasks, and which seed is tried next
policies   the players besides the plain policy: the oracle, and the policy with a hint
"""
