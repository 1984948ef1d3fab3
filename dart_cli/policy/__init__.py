"""The policy: what the model reads, what it writes, and the model itself."""
