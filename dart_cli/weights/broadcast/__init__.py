"""The channels `gloo` and `nccl`: one broadcast brings a version to all workers that lack it.

channel     BroadcastChannel, the trainer's end: publishes, and answers the workers' requests
broadcaster      RoundsThread: collects workers, forms their group, broadcasts
receiver    BroadcastReceiver, a worker's end: takes part, receives into its own copy, checks
group       a process group of the trainer and some workers; over TCP, from memory to memory
transport   what groups of both backends have in common, and their deadlines
nccl        such a group between GPUs: buckets in pinned memory and on the device
rendezvous  how the ends of a group find each other: keys at the trainer, asked for over the bus

A round: the workers that are behind ask the trainer, each naming the tensors whose digests differ from
those that it holds; the trainer waits a moment for those that have not asked yet, and answers all with
the name of a group and their ranks in it; the tensors that any of them lacks are broadcast in buckets,
in the order of the file, into each worker's own copy; each checks the digests of what came.

The group lasts while the same workers take part, and is made anew when one comes or goes. Any error at
any end closes it there, which the others notice at once or, where a process hangs, after `STALL_S`; all
that live ask again, and who does not ask is not in the next group. So no end needs to know who failed.
"""
