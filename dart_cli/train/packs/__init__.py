"""A batch becomes packs: sequences of many steps, each pack one forward pass.

plan    which tokens are one forward pass, on which rank (pure)
share   a batch, cut into the shares of the ranks
pack    chains to tensors: `Pack`, and where its completions are predicted
pointers  where samples point: forced tokens, patches and the screens they are of
feed    packs one after another, their screens prepared ahead
"""
