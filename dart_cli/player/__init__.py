"""Plays episodes in this process, without `dart up`, a bus or the ledger.

episodes   a plan of episodes, a policy for each, and a sink for what came of them
actions    an episode of a player that acts without a policy: a probe, a person
chosen_model      the model that plays: its engine, its weights, and what tells it from another one
"""
