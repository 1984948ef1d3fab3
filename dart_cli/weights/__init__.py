"""How new weights travel from the trainer to the rollout workers.

manifest       manifest.json and the file beside it: digests, layouts, and checks against them
flat_weights   a weight set as one buffer, and the copies into it
file           the channel `file`: one directory for each version; publications in the background
receiver       a worker's end of a channel: the interface, and its form for files
broadcast/     the channels `gloo` and `nccl`: from the trainer's memory to all workers at once
folder         the identity of a model folder
storage        files in shared memory or on disk; directories that are complete or absent
"""
