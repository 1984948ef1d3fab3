"""The policy: what the model reads, what it writes, and the model itself.

codec          what an action language is: model text <-> GUI actions; the languages are in codecs/
shortest_click whether any click fits into rollout.max_tokens, by the tokenizer's file
coordinates    the numbers a model writes <-> pixels of the screenshot
history        which past turns and screenshots are in the prompt
prompt         instruction, turns and screen -> token ids
thoughts       where a thought ends and the reply begins
images         encoded screenshots -> patches for the vision tower
model          the loader of a policy folder, and the device it runs on
model_files    a model folder read in parts, and written
vocabulary     which tokens may be sampled; text that is only text
forward        the forward pass and the log-probabilities that are sampled from
accelerator    all that needs a GPU; no other module names a vendor
packed         the trainer's forward pass: over a pack of trees, with layers that may be recomputed
pack_plan      which tokens of a pack attend to which, as index tables
lora           adapters of low rank, in place of the weights
weight_set     a weight set, as engines load it and weight channels deliver it
pointer/       a head that points at a patch of the screenshot, its tokens, folders that have one
verifier       a model that says whether a place is the one that an instruction names
"""
