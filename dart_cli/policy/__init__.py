"""The policy: what the model reads, what it writes, and the model itself.

prompt         instruction, turns and screen -> token ids
images         encoded screenshots -> patches for the vision tower
loader         the loader of a policy folder, and the device it runs on
model_files    a model folder read in parts, and written
forward        the forward pass and the log-probabilities that are sampled from
packed         the trainer's forward pass: over a pack of trees, with layers that may be recomputed
pack_plan      which tokens of a pack attend to which, as index tables
lora           adapters of low rank, in place of the weights
weight_set     a weight set, as engines load it and weight channels deliver it
pointer/       a head that points at a patch of the screenshot, and folders that have one
verifier       a model that says whether a place is the one that an instruction names
"""
