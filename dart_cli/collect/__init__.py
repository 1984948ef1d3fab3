"""`dart data collect`: successes of the training tasks, for the experience pool.

run        the verb: plays, keeps the successes in the pool or a folder, prints a table
quotas     how many successes of which tasks, and which seed is tried next
"""
