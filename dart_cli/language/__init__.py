"""What the model reads and writes as text, without torch.

parsers/         action parsers: model text <-> GUI actions, one module for each action language
coordinates      the numbers that a model writes <-> pixels of the screenshot
thoughts         where a thought ends and the reply begins
history          which past turns and screenshots are in the prompt
prompts/         system prompts and chat templates, as the models were trained on them
vocabulary       which tokens may be sampled; text that holds no special tokens
pointer_tokens   the three tokens of a pointer, and whether the patches of a completion fit them
pointer_text     numbers of a text <-> pointers among its tokens
shortest_click   whether any click fits into rollout.max_tokens, by the tokenizer's file
"""
