"""`dart export`: a run's weights as a Hugging Face folder, at any time, also beside a live trainer.

    folder    the model as transformers writes it, with the files of the folder that it was trained from
    sources   where the weights come from: a published version, or a checkpoint
    card      README.md of the folder: how the model was trained, what it reaches

A room of its own, above `train`, `data` and `evaluation`: it reads checkpoints, the database and the
results of evaluations, and computes nothing.
"""
