"""`dart train`: takes batches, updates the policy, publishes its weights.

loop            the process: take a batch, update, checkpoint, publish, acknowledge
base            what the loop needs of a learner (protocols), and metrics of a batch
learner         one update from one batch: PolicyLearner
batch           a rank's part of a batch -> tensors, in packs
model           log-probabilities of given tokens, with gradient
parity          compares engine and trainer on tokens of the same weights; stops the run if they differ
logprob_gaps    the log-prob mismatch of each step, for the viewer
checkpoint      what a checkpoint is, and which of them is loaded
saver           writes checkpoints beside the updates
shards          tensors of any number of ranks as safetensors files, read on any other number
state           parameters and optimizer as one flat dict, and back
metric_writer   metrics to TensorBoard and Weights & Biases
timed           a learner that only takes time, to measure scheduling
"""
