"""What a person sees of a run.

health        what is wrong with it, in words
page          a snapshot as a terminal page; `dart status` and `dart up` show the same
utilisation   its part that says who is busy and who waits
tables        how its tables look
watch         asks the data process for snapshots and shows them
"""
