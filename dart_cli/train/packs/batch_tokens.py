"""The tokens of a batch: their ids as arrays, how many there are, and what each weighs in the loss.

int32_array          a packed array of integers -> numpy
image_sizes          the number of tokens of each image
drawn_tokens         the number of tokens of a sample that the policy drew
completion_tokens    the number of tokens that the batch's loss is over
pad_of               the id of `<|pointer_pad|>`, if the policy points
trajectory_of        the key of a sample's trajectory: the ids of its group and of the trajectory
batch_loss_weights   the weight of each token in the batch's loss

A pointer's tokens: with `<|pointer_end|>` a patch of the prompt's last screenshot was drawn.
`<|pointer_pad|>` follows from the token before it, so it has no gradient: it weighs nothing, and no length
and no mean counts it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bus.messages import Batch, Sample
from bus.packed import IntArray
from dart_cli.algo.objective import LossWeights, Normalise, loss_weights
from dart_cli.policy.loader import LoadedPolicy


def int32_array(values: IntArray) -> NDArray[np.int32]:
    """Return the integers of a packed array as a numpy array, not copied."""
    return np.frombuffer(values, dtype=np.int32)


def image_sizes(batch: Batch, policy: LoadedPolicy) -> dict[str, int]:
    """Return the number of tokens of each image, by content hash.

    Raises EngineError for an image that does not decode.
    """
    names = {name for chain in batch.chains for name in chain.image_hashes}
    return {
        name: policy.images.token_count(batch.images[name], name)
        for name in names
        if name in batch.images
    }


def drawn_tokens(batch: Batch, sample: Sample, pad: int | None) -> int:
    """Return how many of the sample's tokens the policy drew: all but those with the id `pad`."""
    return len(sample) if pad is None else len(sample) - batch.completion(sample).count(pad)


def completion_tokens(batch: Batch, pad: int | None = None) -> int:
    """Return how many tokens the batch's loss is over."""
    return sum(drawn_tokens(batch, sample, pad) for sample in batch.samples if sample.weight != 0)


def pad_of(policy: LoadedPolicy) -> int | None:
    """Return the id of `<|pointer_pad|>` if the policy points; else None."""
    return policy.pointer.pad if policy.pointer and policy.pointing == "pointer" else None


def trajectory_of(sample: Sample) -> tuple[str, str]:
    """Return the key of a sample's trajectory: the ids of its group and of the trajectory."""
    return sample.group_id, sample.trajectory_id


def batch_loss_weights(batch: Batch, normalise: Normalise, pad: int | None = None) -> LossWeights:
    """Return the weights of tokens in the batch's loss.

    Samples of weight 0 and tokens with the id `pad` are not counted.
    """
    return loss_weights(
        (
            (trajectory_of(sample), drawn_tokens(batch, sample, pad))
            for sample in batch.samples
            if sample.weight != 0
        ),
        normalise,
    )
