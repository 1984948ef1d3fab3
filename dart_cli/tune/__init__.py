"""Supervised training of a model folder: the `dart tune` verb.

run             the verb, from a configuration to a folder
data            what is learned from, read and checked
trajectories    of it, successes of runs and Parquet files, as they were sampled
layouts/        of it, rows of other projects, each layout by a table
prompts         how items are asked, and what the model shall answer
actions         steps of demonstrations -> prompts with their actions
examples        items of a grounding set, or rows for a verifier -> prompts with their answers
order           which examples an update sees; the same for the same seed, wherever a start begins
defaults        rates, batch and epochs, where they are not set
held_out        rows that are not learned, and what they tell of the training
measure         the model on them, before and after
training_set    passes whose costs are the loss of an update: items, or the trainer's packs of steps
loss            language loss of the answer, and where its pointer should point
schedule        how much of the budget is over, and the learning rate
trainer         one stage: what is trained, the updates, the state to go on from
stages          all stages, update by update
curve           what the updates cost
kept            the folder of a training that is not over: settings, curve, state
output          the folder that comes of it
verifier_rows   rows for a verifier from a grounding set: the `dart model verifier-rows` verb
"""
