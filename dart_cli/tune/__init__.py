"""Supervised training of a model folder: `dart tune`.

tuning          the command: reads the data, trains, writes a folder
data            reads and checks the training data
trajectories    training data: successes of runs and Parquet files, as they were sampled
episodes        training data: episodes that were played elsewhere, as prompts with their actions
examples        training data: items of a grounding set or rows for a verifier, as prompts with their answers
training_set    forward passes whose costs add up to the loss of an update; the order of the examples
held_out        rows that are not learned, and measurements of the model on them
defaults        learning rates, batch and epochs, where the configuration leaves them open
loss            the loss of an answer: its tokens, and where its pointer should point
trainer         one stage of the training: what is trained, the updates, the state to continue from
stages          runs all stages, update by update
pace            the time budget of stages, and the progress line: loss, held-out rows, time left
settings        everything that the weights depend on; a second start with other settings is refused
training_state  the folder of an unfinished training: state, curve, first measurement
output          writes the new folder and prints the result
verifier_rows   makes rows for a verifier from a grounding set: `dart model verifier-rows`
"""
