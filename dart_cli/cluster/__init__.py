"""`dart up --ray`: the processes of a run on the nodes of a Ray cluster.

    demands      what each process asks of a cluster, and what a cluster lacks for it; pure
    connection   a cluster of the user's, or Ray started for this run on this host
    role_host    an actor of Ray's: one command of `dart` as a child process on one node
    process      that child, as the supervisor of the run sees it; the ranks of a trainer as one
    placing      placement groups and actors: where each process runs, and runs again
    cluster_run  the run as a whole: configuration, keys, ports, folders, from its start to its end

Nothing but this room imports Ray. The roles are the commands that a person would type on each host
(docs/box.md): they reach each other over tcp with CURVE keys, and through Ray go the configuration, the
keys, what they print and the signals that end them. Ray's own calls travel as its pickles, among those who
have its cluster's token; nothing that comes back to `dart up` is more than text, bytes and numbers.
"""
