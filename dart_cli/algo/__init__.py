"""The mathematics of the run, pure and named by axis; docs/objective.md shows it at a glance.

advantage  rewards of a group -> advantages       schedule   success rates -> what to play next
normalise  what each sample's tokens weigh        objective  which formula, and its numbers

These know torch:

surrogate  what the update follows: GRPO, GSPO, CISPO      correction  weights for stale tokens
loss       the objective, put together                     entropy     of a distribution
"""
