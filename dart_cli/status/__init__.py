"""`dart status`: a run's state for people and for monitoring.

watch        asks the data service for snapshots and shows them
window       the page of a snapshot, which `dart status` and `dart up` show: whole, or what a window has room for
page_layout      which sections of a page fit a window, by importance
page         its parts: how far the run is, its problems, success by task, numbers
workers      its parts on processes: what they do, where their time went, the weights that they took
prometheus   its numbers as Prometheus metrics
processes    what is known without a data process: why none answers, the stacks of all processes
"""
