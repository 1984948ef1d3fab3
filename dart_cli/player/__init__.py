"""Playing episodes in this process, without `dart up`, a bus or the ledger.

episodes      plays a plan of episodes, each with a policy and a sink for its steps
actions       plays an episode with a player that acts without a policy: a probe or a person
chosen_model  loads the model that plays, with the weights that the user or the run chooses
"""
