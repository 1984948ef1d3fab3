"""How new weights travel from the trainer to the rollout workers.

base              the interfaces: WeightChannel, the trainer's end; Receiver, a worker's end
publication       a version on its way: copied first, digested and written beside what follows
file              the channel `file`: one directory per version
broadcast/        the channels `gloo` and `nccl`: from the trainer's memory to all workers at once
mirror            a worker's own copy of the newest version, and the receiver of deltas
delta             the difference of two versions, bit for bit
delta_chain       how a version is rebuilt from a whole set and deltas
manifest          manifest.json: digests, and the checks against them
layout            the offset of each tensor in a safetensors file
flat_weights      a weight set as one buffer
storage           shared memory or disk
atomic_directory  directories that are complete or absent
"""
