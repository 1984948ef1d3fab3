"""The policy: what the model sees, how it is run, and what its text means."""
