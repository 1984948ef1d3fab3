"""`dart status`: a run's state for people and for monitoring.

watch              asks the data service for snapshots and shows them: the `dart status` command
status_page        the page of a snapshot, whole or as much of it as fits the window: `dart status`, `dart up`
run_sections       the sections of the page on the run: progress, problems, success by task, numbers
process_sections   its sections on processes: what they do, where their time went, the weights that they took
judges             what a judge model decided, in words and as JSON
window_fit         chooses the sections that fit a window, the most important ones first
prometheus         the numbers of the snapshot as Prometheus metrics
host_processes     what this host shows of a run whose data service does not answer; stacks of all processes
"""
