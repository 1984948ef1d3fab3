"""`dart status`: a run's state for people and for monitoring.

watch        asks the data process for snapshots and shows them
page         a snapshot as a terminal page, which `dart status` and `dart up` show; its problems, one line each
prometheus   its numbers as Prometheus metrics
processes    what is known without a data process: why none answers, the stacks of all processes
"""
