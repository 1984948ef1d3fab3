"""The policy: what the model reads, what it writes, and the model itself.

codec          model text <-> GUI actions; the languages are in codecs/
shortest_click whether any click fits into rollout.max_tokens, by the tokenizer's file
coordinates    the numbers a model writes <-> pixels of the screenshot
history        which past turns and screenshots are in the prompt
prompt         instruction, turns and screen -> token ids
images         encoded screenshots -> patches for the vision tower
model          the loader of a policy folder
shard_files    the loader of a rank's part of such a folder
vocabulary     which tokens may be sampled; text that is only text
forward        the forward pass and the log-probabilities that are sampled from
packed         the forward pass over a pack: trees of token sequences, each token once
pack_plan      which tokens of a pack attend to which, as index tables
attention      attention over a pack, without an L x L mask
recompute      layers that keep their input alone for the backward pass
lora           adapters of low rank, in place of the weights
device         the device a model runs on
weight_set     a weight set, as engines load it and weight channels deliver it
pointer/       a head that points at a patch of the screenshot, its tokens, folders that have one
saved_folder   a model folder that is written
verifier       a model that says whether a place is the one that an instruction names
"""
