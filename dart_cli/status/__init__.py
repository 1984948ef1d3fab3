"""What a person sees of a run.

health   what is wrong with it, in words
page     a snapshot as a terminal page; `dart status` and `dart up` show the same
watch    asks the data process for snapshots and shows them
"""
