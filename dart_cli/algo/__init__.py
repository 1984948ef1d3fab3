"""The mathematics of the run, pure and named by axis; docs/objective.md is the overview.

advantage          rewards of a group -> advantages, and which steps of the group are trained on
objective          the settings of the loss, and what the loss is a mean over
learning_rate      an update's place in the run -> its learning rate
task_sampling      success rates -> which task is played next, and how often
action_values      which action an explorer of applications tries next, from what was tried before
regions            a pointer's distribution over the cells of a screen -> where it points
running_baselines  expected rewards of tasks and steps -> advantages without groups
memory_bounds      sizes that bound the trainer's memory
statistics         confidence intervals of shares of episodes; tests whether policies or raters differ
logprob_gap        how far two log-probabilities of the same tokens are apart

These import torch:

loss               the whole objective: the policy loss of a pack and statistics of its tokens
chunked            log-probabilities and entropies, without the logits of all tokens in memory
pointing           where a pointer should point, and how far it is from there
"""
