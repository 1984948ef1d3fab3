"""The mathematics of the run, pure and named by axis; docs/objective.md is the overview.

advantage      rewards of a group -> advantages, and which of its steps are trained on
objective      which formula is used, its numbers, and what the loss is a mean over
learning_rate  an update's place in the run -> its learning rate
task_sampling       success rates -> which task to play next, and how often
action_values    which action an explorer tries next, by a memory of what was tried
regions        a pointer's distribution over the cells of a screen -> where it points
running_baselines      expected rewards of tasks and steps -> advantages without groups
memory_bounds  sizes that bound the trainer's memory
statistics     how certain shares of episodes are, and whether policies or raters differ
logprob_gap       the distance of two log-probabilities of the same tokens

These import torch:

loss           the whole objective
chunked        log-probabilities without the logits of all tokens
pointing       where a pointer should point, and how far it is from there
"""
