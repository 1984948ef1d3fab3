"""`dart train`: takes batches, updates the policy, publishes its weights.

process         the process around the trainer: connections, what it waits for
loop            the trainer: take a batch, update, checkpoint, publish, acknowledge
data_client     its side of the conversation with data
publishing      publications beside the updates, and the weight channel
base            what the loop needs of a learner, and metrics of a batch
learner         one update from one batch: PolicyLearner
packs/          a batch becomes packs: sequences of many steps, each pack one forward pass
trained_policy           log-probabilities of given tokens and of patches, with gradient
sharded         the model over several GPUs (FSDP2)
rank_group      what a rank needs of the others; what an update found, gathered of all
ranks/          the processes that train one model together
checkpoints/    where a trainer goes on after its end
parity          compares engine and trainer on tokens of the same weights; stops the run if they differ
blindness           whether the model sees: what grey screens change
metric_writer   metrics to TensorBoard and Weights & Biases
"""
