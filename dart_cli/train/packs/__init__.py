"""A batch becomes packs: sequences of many steps, each pack one forward pass.

batch_check    refuses a batch that the model cannot be trained on
batch_tokens   token ids of a batch as arrays, numbers of tokens, and their weights in the loss
plan           which tokens are one forward pass, on which rank (pure)
rank_shares    the parts of a batch that the ranks train on
pack           a rank's part as tensors: packs one after another, their screens prepared ahead
"""
