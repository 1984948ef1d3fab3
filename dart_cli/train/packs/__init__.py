"""A batch becomes packs: sequences of many steps, each pack one forward pass.

share   a batch, checked and cut into the shares of the ranks
plan    which tokens are one forward pass, on which rank (pure)
pack    a share as tensors: packs one after another, their screens prepared ahead
"""
