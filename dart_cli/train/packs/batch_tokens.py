"""The tokens of a batch: their ids as arrays, how many there are, and what each weighs in the loss.

int32_array        a packed array of numbers -> numpy
image_sizes        tokens of each image
drawn_tokens       tokens of a sample that the policy drew
completion_tokens  tokens that the batch's loss is over
batch_loss_weights weight of each token in the batch's loss
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bus.messages import Batch, Sample
from bus.packed import IntArray
from dart_cli.algo.objective import LossWeights, Normalise, loss_weights
from dart_cli.policy.loader import LoadedPolicy


def int32_array(values: IntArray) -> NDArray[np.int32]:
    """Return the numbers of a packed array, not copied."""
    return np.frombuffer(values, dtype=np.int32)


def image_sizes(batch: Batch, policy: LoadedPolicy) -> dict[str, int]:
    """Tokens of each image, by content hash. Raises EngineError for one that does not decode."""
    shown = {name for chain in batch.chains for name in chain.image_hashes}
    return {
        name: policy.images.token_count(batch.images[name], name)
        for name in shown
        if name in batch.images
    }


def drawn_tokens(batch: Batch, sample: Sample, pad: int | None) -> int:
    """How many of the sample's tokens the policy drew: all but its `pad`s."""
    return len(sample) if pad is None else len(sample) - batch.completion(sample).count(pad)


def completion_tokens(batch: Batch, pad: int | None = None) -> int:
    """How many tokens the batch's loss is over."""
    return sum(drawn_tokens(batch, each, pad) for each in batch.samples if each.weight != 0)


def pad_of(policy: LoadedPolicy) -> int | None:
    """Return the id of `<|pointer_pad|>` where the policy points; else None."""
    return policy.pointer.pad if policy.pointer and policy.pointing == "pointer" else None


def trajectory_of(sample: Sample) -> tuple[str, str]:
    """Which trajectory of the batch a sample is of: its group's id, and its own."""
    return sample.group_id, sample.trajectory_id


def batch_loss_weights(batch: Batch, normalise: Normalise, pad: int | None = None) -> LossWeights:
    """Return the weight of each token in the batch's loss; samples of weight 0 count nowhere, nor does `pad`."""
    return loss_weights(
        (
            (trajectory_of(sample), drawn_tokens(batch, sample, pad))
            for sample in batch.samples
            if sample.weight != 0
        ),
        normalise,
    )
