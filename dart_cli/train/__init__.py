"""`dart train`: takes batches, updates the policy, publishes its weights."""
