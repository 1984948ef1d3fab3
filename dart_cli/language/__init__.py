"""The language of the model: the texts and tokens that it reads and writes. Nothing here imports torch.

parsers/         action parsers, which turn model text into GUI actions and back
coordinates      maps the numbers that a model writes to pixels of the screenshot, and back
thoughts         finds where a thought ends and the reply begins
history          chooses which past turns and screenshots are in the prompt
prompts/         system prompts and chat templates, as the models were trained on them
vocabulary       lists the tokens that may not be sampled, and keeps outside text free of special tokens
pointer_tokens   names the three tokens of a pointer, and checks that the patches of a completion fit them
pointer_text     turns the numbers of a text into pointers among its tokens, and back
shortest_click   checks that a click fits into rollout.max_tokens
"""
