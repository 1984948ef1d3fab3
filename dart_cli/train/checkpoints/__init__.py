"""Checkpoints: the state from which a trainer resumes, whatever ended it.

checkpoint   reads checkpoints, and writes them beside the updates; each is whole or absent, without pickle
identity     reads state.json without torch; checks whether a configuration can go on from a checkpoint
shards       tensors of any number of ranks as safetensors files, read on any other number of ranks
"""
