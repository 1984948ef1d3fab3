"""`dart train`: takes batches from the data service, updates the policy, publishes its weights.

process         the process around the trainer: its connections, and reports of what it waits for
loop            the trainer: take a batch, update, checkpoint, publish, acknowledge
data_client     the trainer's requests to the data service
publishing      publications beside the updates, and the weight channel
base            what the loop needs of a learner, and metrics of a batch
learner         one update from one batch: PolicyLearner
packs/          a batch becomes packs: sequences of many steps, each pack one forward pass
trained_policy  log-probabilities of given tokens and of patches, with gradient
critic          the reward to expect before each step, estimated from the policy's hidden states
sharded         the model over several GPUs (FSDP2)
rank_group      what a rank needs of the other ranks; results of an update, gathered from all ranks
ranks/          the processes that train one model together
checkpoints/    the state from which a trainer resumes
logprob_check   compares engine and trainer on tokens of the same weights; stops the run if they differ
blindness       a test whether the model uses its screenshots: how much grey ones change its scores
metric_writer   writes metrics for TensorBoard and Weights & Biases
"""
