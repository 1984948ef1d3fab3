"""The policy: its prompts, its model, and the forward passes of engine and trainer.

prompt          turns an instruction, past turns and a screenshot into token ids
images          turns encoded screenshots into patches for the vision tower
loader          loads a policy folder
model_files     reads the tensors of a model folder one by one, and writes a model folder
forward         the engine's forward pass, and the log-probabilities that tokens are sampled from
packed          the trainer's forward pass over a pack of trees, with layers that may be recomputed
experts         the choice of experts in mixtures, which engines record and the trainer replays
delta_net       the forward pass of layers with a recurrent state
state_plan      the index tables with which such layers compute trees and batches
pack_plan       the index tables that say which tokens of a pack attend to which
lora            adapters of low rank, which are trained in place of the weights
weight_set      a weight set, as weight channels deliver it and engines load it
pointer_head    the head that points at a patch of the screenshot
pointer_folder  adds a pointer head to a model folder, and loads it
verifier        a second model that checks whether a place is the one that an instruction names
"""
