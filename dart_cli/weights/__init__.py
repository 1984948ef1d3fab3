"""How new weights travel from the trainer to the rollout workers.

manifest       manifest.json and the files beside it: digests, layouts, and the checks against them
flat_weights   a weight set as one buffer, and the copies into it
file           the channel `file`: one directory per version; a version on its way
receiver       a worker's end: the interface, and that of files
broadcast/     the channels `gloo` and `nccl`: from the trainer's memory to all workers at once
folder         what tells a model folder from another one
storage        shared memory or disk; directories that are complete or absent
"""
