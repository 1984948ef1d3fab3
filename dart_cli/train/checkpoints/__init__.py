"""Where a trainer goes on after its end, whatever ended it.

checkpoint   checkpoints as they are read, whole or absent, without pickle; which one a trainer loads
identity     what its state.json says, without torch; whether a configuration goes on from it
saver        writes them beside the updates that follow; they count when they are complete
shards          tensors of any number of ranks as safetensors files, read on any other number
"""
