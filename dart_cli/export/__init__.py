"""`dart export`: a run's weights as a Hugging Face folder, at any time, also while the run is live.

    folder    writes the model as transformers does, with the other files of its base folder
    sources   reads the weights of a published version, or of a checkpoint
    card      writes README.md of the folder: how the model was trained, and its success

The package may import `train`, `data` and `evaluation`, because it reads checkpoints, the database and the
results of evaluations. It computes nothing.
"""
