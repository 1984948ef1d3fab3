"""Supervised training of a model folder: the `dart tune` verb.

tuning             the verb, from a configuration to a folder
data            what is learned from, read and checked
trajectories    of it, successes of runs and Parquet files, as they were sampled
episodes        of it, episodes that others played -> prompts with their actions
examples        items of a grounding set, or rows for a verifier -> prompts with their answers
training_set    passes whose costs are the loss of an update: items, or the trainer's packs of steps; their order
held_out        rows that are not learned, and the model on them before and after
defaults        rates, batch and epochs, where they are not set
loss            language loss of the answer, and where its pointer should point
trainer         one stage: what is trained, the updates, the state to go on from
stages          all stages, update by update: their rate and curve
pace            their budget, and what is said while they go on: loss, held-out rows, time left
settings        all that the weights depend on; what a second start is refused for
training_state            the folder of a training that is not over: curve, state, first measurement
output          the folder that comes of it
verifier_rows   rows for a verifier from a grounding set: the `dart model verifier-rows` verb
"""
