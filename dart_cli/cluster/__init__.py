"""`dart up --ray`: the processes of a run on the nodes of a Ray cluster.

    demands      computes what each process asks of a cluster, and what a cluster lacks for it (pure)
    connection   connects to a cluster of the user, or starts Ray for this run on this host
    role_host    a Ray actor: one command of `dart` as a child process on one node
    process      this child, as the supervisor of the run sees it; the ranks of a trainer as one process
    placing      places processes: placement groups, and actors that may be restarted elsewhere
    cluster_run  the run as a whole: configuration, keys, ports, folders, from its start to its end

Only this package imports Ray. The roles are the commands that a person would type on each host (docs/box.md),
which reach each other over TCP with CURVE keys. Configuration, keys, output and signals go through Ray. Ray's
own calls are pickles, which only holders of the cluster's token can send; `dart up` gets back only text,
bytes and numbers.
"""
