"""Where a trainer goes on after its end, whatever ended it.

checkpoint   checkpoints, written beside the updates and read, whole or absent, without pickle
identity     what their state.json says, without torch; whether a configuration goes on from one
shards       tensors of any number of ranks as safetensors files, read on any other number
"""
