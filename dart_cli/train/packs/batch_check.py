"""Refusals of a batch that the model cannot be trained on.

    check_batch   raises an error that names the first sample that does not fit, and why

Rank 0 calls it before a batch is cut into the parts of the ranks (rank_shares.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from bus.errors import ProtocolError
from bus.messages import Batch, Chain, Sample
from dart_cli.language.pointer_tokens import patch_mistake
from dart_cli.policy.experts import RoutingShape, routing_array
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.train.packs.batch_tokens import image_sizes, int32_array

_NONE = np.zeros(0)


def check_batch(batch: Batch, policy: LoadedPolicy) -> None:
    """Raise ProtocolError for a batch that cannot be trained on; the error names the sample and the cause.

    Raises EngineError for an image that does not decode.
    """
    vocabulary = int(policy.model.get_input_embeddings().weight.shape[0])
    is_never_sampled = np.zeros(vocabulary, dtype=bool)
    is_never_sampled[list(policy.absent_token_ids)] = True
    sizes = image_sizes(batch, policy)
    chain_faults = [_chain_fault(chain, vocabulary, policy, sizes) for chain in batch.chains]
    for sample in batch.samples:
        cause = _fault(sample, batch, policy) or chain_faults[sample.chain]
        if not cause and is_never_sampled[int32_array(batch.completion(sample))].any():
            cause = "its completion holds a token that is never sampled"
        cause = cause or _image_fault(sample, batch, policy, sizes)
        cause = cause or _hint_fault(sample, batch, policy, vocabulary)
        if cause or (cause := _pointer_fault(batch, sample, policy, sizes)):
            raise ProtocolError(
                f"batch {batch.batch_id}, {sample.trajectory_id} step {sample.step}: {cause}; "
                "was it sampled with this model?"
            )


def _fault(sample: Sample, batch: Batch, policy: LoadedPolicy) -> str:
    """Return what is wrong with a sample apart from its token ids; empty if nothing is."""
    if not sample.chain < len(batch.chains):
        return f"chain {sample.chain} is missing"
    chain = batch.chains[sample.chain]
    if not 0 < sample.start < sample.end:
        return "its prompt or completion is empty"
    if sample.end > len(chain.token_ids) or sample.images > len(chain.image_hashes):
        return "its chain ends before it"
    if len(sample.behaviour_logprobs) not in (0, len(sample)):
        return f"{len(sample)} tokens, {len(sample.behaviour_logprobs)} log-probabilities"
    if sample.end > policy.max_positions:
        return f"{sample.end} tokens, the model has {policy.max_positions} positions"
    numbers = np.frombuffer(sample.behaviour_logprobs) if sample.behaviour_logprobs else _NONE
    if not (np.isfinite(numbers).all() and isfinite(sample.advantage) and isfinite(sample.weight)):
        return "a log-probability, advantage or weight is not finite"
    return ""


def _chain_fault(
    chain: Chain, vocabulary: int, policy: LoadedPolicy, sizes: Mapping[str, int]
) -> str:
    """Return what is wrong with the tokens and images of a chain; empty if nothing is."""
    missing = [name for name in chain.image_hashes if name not in sizes]
    if missing:
        return f"image {missing[0]} is missing"
    token_ids = int32_array(chain.token_ids)
    if chain.routing:
        shape = RoutingShape.of(policy.model)
        if shape is None:
            return "it has the routing of a mixture of experts, which this model is not"
        if len(chain.routing) != len(token_ids) * shape.nbytes:
            return f"{len(chain.routing)} bytes of routing, {len(token_ids)} tokens need {shape.nbytes} each"
        if int(routing_array(chain.routing, shape).max()) >= shape.experts:
            return f"its routing names an expert beyond the model's {shape.experts}"
    if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < vocabulary:
        return "a token id is not in the vocabulary"
    places = np.flatnonzero(token_ids == policy.image_token_id)
    count = sum(sizes[name] for name in chain.image_hashes)
    if len(places) != count:
        return f"{len(places)} image placeholders, its images need {count}"
    begins = _firsts(places, [sizes[name] for name in chain.image_hashes])
    for first, name in zip(begins, chain.image_hashes, strict=True):
        if (token_ids[first : first + sizes[name]] != policy.image_token_id).any():
            return f"the {sizes[name]} placeholders of an image are not adjacent"
    return ""


def _image_fault(
    sample: Sample, batch: Batch, policy: LoadedPolicy, sizes: Mapping[str, int]
) -> str:
    """Return what is wrong with the image placeholders of a prompt; empty if its images need as many."""
    prompt = int32_array(batch.chains[sample.chain].token_ids)[: sample.start]
    placeholders = int((prompt == policy.image_token_id).sum())
    count = sum(sizes[name] for name in batch.image_hashes(sample))
    if placeholders == count:
        return ""
    return f"{placeholders} image placeholders, its images need {count}"


def _hint_fault(sample: Sample, batch: Batch, policy: LoadedPolicy, vocabulary: int) -> str:
    """Return what is wrong with a sample's hint; empty if it has none, or one that fits its prompt."""
    hint = sample.hint
    if hint is None:
        return ""
    if not hint.start <= hint.end <= sample.start:
        return "its hint is outside of its prompt"
    own, other = (
        int32_array(batch.prompt(sample)[hint.start : hint.end]),
        int32_array(hint.token_ids),
    )
    if len(other) and not 0 <= other.min() <= other.max() < vocabulary:
        return "a token id of its hint is not in the vocabulary"
    places = [int((tokens == policy.image_token_id).sum()) for tokens in (own, other)]
    return "" if places[0] == places[1] else "its hint changes the images of its prompt"


def _pointer_fault(
    batch: Batch, sample: Sample, policy: LoadedPolicy, sizes: Mapping[str, int]
) -> str:
    """Return what is wrong with a sample's patches; empty if nothing is.

    `sizes` are the numbers of cells of images, by their content hashes.
    """
    if policy.pointer is None or policy.pointing == "text":
        return "it points, the policy writes numbers (policy.pointing)" if sample.patches else ""
    images = batch.image_hashes(sample)
    if sample.patches and not images:
        return "it points, but its prompt shows no screen"
    return patch_mistake(
        batch.completion(sample).tolist(),
        sample.patches,
        np.frombuffer(sample.behaviour_logprobs).tolist() if sample.behaviour_logprobs else (),
        triple=policy.pointer.triple,
        cells=sizes[images[-1]] if images else None,
    )


def _firsts(places: NDArray[np.intp], counts: Sequence[int]) -> list[int]:
    """Return the place of each image's first placeholder.

    `places` are the places of all placeholders, `counts` how many of them each image has.
    """
    return [int(places[index]) for index in np.cumsum([0, *counts])[: len(counts)]]
