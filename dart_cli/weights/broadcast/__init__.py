"""The channels `gloo` and `nccl`: one broadcast brings a version to all workers that lack it.

channel      BroadcastChannel, the trainer's end: publishes, and answers the workers' requests
broadcaster  RoundsThread: collects workers, forms their group, broadcasts
receiver     BroadcastReceiver, a worker's end: takes part, receives into its own copy, checks it
group        makes a process group of the trainer and some workers
gloo         a group over TCP, from main memory to main memory
nccl         a group between GPUs: buckets in pinned memory and on the device
transport    the interface of groups of both backends, and their deadlines
rendezvous   how the processes of a group find each other: keys at the trainer, requested over the bus

A round has four steps:

1. The workers that lack the newest version ask the trainer. Each names the tensors whose digests differ from
   its own.
2. The trainer waits a moment for workers that have not asked yet. It answers all with the name of a group and
   their ranks in it.
3. The tensors that any of them lacks are broadcast in buckets, in the order of the file, into each
   worker's own copy.
4. Each worker checks the digests of the tensors that it received.

The group lasts while the same workers take part, and is made anew when one comes or goes. An error in any
process closes the group there. The others notice it at once or, if a process hangs, after `STALL_S`. All
live workers then ask again, and a worker that does not ask is not in the next group. So no process needs to
find out which one failed.
"""
