"""Supervised training of a model folder on grounding data: the `dart model sft` verb.

examples   items of a grounding set, or rows for a verifier -> prompts with their answers
order      which examples an update sees; the same for the same seed, wherever a start begins
loss       language loss of the answer, and where its pointer should point
schedule   how much of the budget is over, and the learning rate
trainer    the stages: what is trained, the updates, the state to go on from
kept       the folder of a training that is not over: settings, curve, state
rows       rows for a verifier from a grounding set: the `dart model verifier-rows` verb
run        the verb
"""
