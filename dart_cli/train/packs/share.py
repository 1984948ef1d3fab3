"""A batch, checked and cut into the shares of the ranks; rank 0 does this, for all.

    check            an error for a batch that does not fit the model, which names the sample
    batch_shares     what each token of a batch weighs in its loss
    packed_batches   a batch -> for each rank its samples, and the packs in which it scores them
    shares_of        a batch -> the Share of each rank

Which samples are in one pack, and on which rank, changes no number of the update (up to the order in
which gradients are added): divisors are the whole batch's, and ranks add up what they find before
anything is decided (rank_group.py).

With `<|pointer_end|>` a patch of the prompt's last screenshot was drawn; `<|pointer_pad|>` follows from
the token before it: it has no gradient, so it weighs nothing and counts in no length and no mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bus.errors import ProtocolError
from bus.messages import Batch, Chain, Sample
from bus.packed import IntArray, float64s, int32s
from bus.ranks import PackedBatch, PackNodes, Share
from dart_cli.algo.objective import LossShares, Normalise, loss_shares
from dart_cli.language.pointer_tokens import patch_mistake
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.train.packs.plan import IMAGE, Costs, PlannedPack, Tokens, plan

_NONE = np.zeros(0)


# --- what is refused ----------------------------------------------------------------------------


def check(batch: Batch, policy: LoadedPolicy) -> None:
    """Refuse a batch that cannot be trained on. Raises ProtocolError naming sample and cause."""
    vocabulary = int(policy.model.get_input_embeddings().weight.shape[0])
    never = np.zeros(vocabulary, dtype=bool)
    never[list(policy.absent_token_ids)] = True
    sizes = image_sizes(batch, policy)
    chains = [_chain_fault(chain, vocabulary, policy, sizes) for chain in batch.chains]
    for sample in batch.samples:
        cause = _fault(sample, batch, policy) or chains[sample.chain]
        if not cause and never[ids(batch.completion(sample))].any():
            cause = "its completion holds a token that is never sampled"
        cause = cause or _image_fault(sample, batch, policy, sizes)
        if cause or (cause := _pointer_fault(batch, sample, policy, sizes)):
            raise ProtocolError(
                f"batch {batch.batch_id}, {sample.trajectory_id} step {sample.step}: {cause}; "
                "was it sampled with this model?"
            )


def image_sizes(batch: Batch, policy: LoadedPolicy) -> dict[str, int]:
    """Tokens of each image, by content hash. Raises EngineError for one that does not decode."""
    shown = {name for chain in batch.chains for name in chain.image_hashes}
    return {
        name: policy.images.token_count(batch.images[name], name)
        for name in shown
        if name in batch.images
    }


def _fault(sample: Sample, batch: Batch, policy: LoadedPolicy) -> str:
    """Return what is wrong with a sample but for its tokens; empty if nothing is."""
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
    """Return what is wrong with the tokens and images of a chain."""
    missing = [name for name in chain.image_hashes if name not in sizes]
    if missing:
        return f"image {missing[0]} is missing"
    token_ids = ids(chain.token_ids)
    if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < vocabulary:
        return "a token id is not in the vocabulary"
    places = np.flatnonzero(token_ids == policy.image_token_id)
    needed = sum(sizes[name] for name in chain.image_hashes)
    if len(places) != needed:
        return f"{len(places)} image placeholders, its images need {needed}"
    begins = _firsts(places, [sizes[name] for name in chain.image_hashes])
    for first, name in zip(begins, chain.image_hashes, strict=True):
        if (token_ids[first : first + sizes[name]] != policy.image_token_id).any():
            return f"the {sizes[name]} placeholders of an image are not adjacent"
    return ""


def _image_fault(
    sample: Sample, batch: Batch, policy: LoadedPolicy, sizes: Mapping[str, int]
) -> str:
    """Whether the prompt shows as many images as it says, whole."""
    prompt = ids(batch.chains[sample.chain].token_ids)[: sample.start]
    shown = int((prompt == policy.image_token_id).sum())
    needed = sum(sizes[name] for name in batch.image_hashes(sample))
    return "" if shown == needed else f"{shown} image placeholders, its images need {needed}"


def _firsts(places: NDArray[np.intp], counts: Sequence[int]) -> list[int]:
    """Where each image begins, of the places of all placeholders."""
    return [int(places[index]) for index in np.cumsum([0, *counts])[: len(counts)]]


# --- what a token weighs ------------------------------------------------------------------------


def trajectory_of(sample: Sample) -> tuple[str, str]:
    """Which trajectory of the batch a sample is of: its group's id, and its own."""
    return sample.group_id, sample.trajectory_id


def batch_shares(batch: Batch, normalise: Normalise, pad: int | None = None) -> LossShares:
    """Return the weight of each token in the batch's loss; samples of weight 0 count nowhere, nor does `pad`."""
    return loss_shares(
        (
            (trajectory_of(sample), drawn_tokens(batch, sample, pad))
            for sample in batch.samples
            if sample.weight != 0
        ),
        normalise,
    )


def completion_tokens(batch: Batch, pad: int | None = None) -> int:
    """How many tokens the batch's loss is over."""
    return sum(drawn_tokens(batch, each, pad) for each in batch.samples if each.weight != 0)


def pad_of(policy: LoadedPolicy) -> int | None:
    """Return the id of `<|pointer_pad|>` where the policy points; else None."""
    return policy.pointer.pad if policy.pointer and policy.pointing == "pointer" else None


def drawn_tokens(batch: Batch, sample: Sample, pad: int | None) -> int:
    """How many of the sample's tokens the policy drew: all but its `pad`s."""
    return len(sample) if pad is None else len(sample) - batch.completion(sample).count(pad)


def _pointer_fault(
    batch: Batch, sample: Sample, policy: LoadedPolicy, sizes: Mapping[str, int]
) -> str:
    """Return what is wrong with a sample's patches; empty if nothing. `sizes` are cells of an image by its hash."""
    if policy.pointer is None or policy.pointing == "text":
        return "it points, the policy writes numbers (policy.pointing)" if sample.patches else ""
    shown = batch.image_hashes(sample)
    if sample.patches and not shown:
        return "it points, but its prompt shows no screen"
    return patch_mistake(
        batch.completion(sample).tolist(),
        sample.patches,
        np.frombuffer(sample.behaviour_logprobs).tolist() if sample.behaviour_logprobs else (),
        triple=policy.pointer.triple,
        cells=sizes[shown[-1]] if shown else None,
    )


# --- packs and shares --------------------------------------------------------------------------


def ids(values: IntArray) -> NDArray[np.int32]:
    """Return the numbers of a packed array, not copied."""
    return np.frombuffer(values, dtype=np.int32)


def _cut_chain(chain: Chain, length: int, image_token: int, sizes: Mapping[str, int]) -> Chain:
    """Return the first `length` tokens, with the images that they show; `sizes` in tokens by content hash."""
    if length == len(chain.token_ids):
        return chain
    token_ids = chain.token_ids[:length]
    left, names = int((ids(token_ids) == image_token).sum()), []
    for name in chain.image_hashes:
        if left > 0:
            names.append(name)
            left -= sizes[name]
    return chain.model_copy(update={"token_ids": token_ids, "image_hashes": names})


def _tokens_of(
    chain: Chain, image_token: int, numbers: Mapping[str, int], sizes: Mapping[str, int]
) -> Tokens:
    """Return the chain as the plan reads it: each image by its number.

    `numbers` and `sizes` are those of images by content hash: any number, and tokens.
    """
    token_ids = ids(chain.token_ids)
    read = token_ids.astype(np.uint32)
    counts = [sizes[name] for name in chain.image_hashes]
    images = np.array([IMAGE + numbers[name] for name in chain.image_hashes], dtype=np.uint32)
    read[token_ids == image_token] = images.repeat(counts)
    return read


def _costs_of(policy: LoadedPolicy) -> Costs:
    """Floating-point operations of a forward pass.

    Two for each weight that a token meets; four for each pair of tokens, head and its width (arXiv
    2001.08361 section 2.1).
    """
    inner: Any = policy.model.model
    text: Any = policy.model.config.get_text_config()
    heads = int(text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    language = sum(each.numel() for each in inner.language_model.layers.parameters())
    tower = sum(each.numel() for each in inner.visual.blocks.parameters())
    return Costs(
        token=2.0 * language,
        pair=4.0 * int(text.num_hidden_layers) * heads * width,
        image_token=2.0 * tower * policy.images.merge**2,
    )


def packed_batches(
    batch: Batch, policy: LoadedPolicy, *, pack_tokens: int, ranks: int = 1
) -> list[PackedBatch]:
    """Return the part of each rank; samples of weight 0 are in none. The batch must have passed `check`."""
    lengths: dict[int, int] = {}  # chain -> its tokens up to the last sample's end
    for sample in batch.samples:
        if sample.weight != 0:
            lengths[sample.chain] = max(lengths.get(sample.chain, 0), sample.end)
    chains = sorted(lengths)
    sizes = image_sizes(batch, policy)
    numbers = {name: index for index, name in enumerate(batch.images)}
    cut = {
        chain: _cut_chain(batch.chains[chain], length, policy.image_token_id, sizes)
        for chain, length in lengths.items()
    }
    planned = plan(
        [_tokens_of(cut[chain], policy.image_token_id, numbers, sizes) for chain in chains],
        pack_tokens=pack_tokens,
        costs=_costs_of(policy),
        ranks=ranks,
    )
    return [_part(batch, cut, chains, packs) for packs in planned]


def _part(
    batch: Batch,
    cut: Mapping[int, Chain],
    chains: Sequence[int],
    packs: Sequence[PlannedPack],
) -> PackedBatch:
    """Return the packs of one rank, with those of the batch's chains, samples and images that they need.

    `cut` are the chains, by their index in the batch, up to their last sample; `chains` those indices
    as the plan counts them.
    """
    scored = {chains[sequence] for pack in packs for sequence, _ in pack.ends}
    needed = sorted(scored | {chains[node.sequence] for pack in packs for node in pack.nodes})
    place = {chain: index for index, chain in enumerate(needed)}
    names = {name: None for chain in needed for name in cut[chain].image_hashes}
    own = batch.model_copy(
        update={
            "chains": [cut[chain] for chain in needed],
            "samples": [
                sample.model_copy(update={"chain": place[sample.chain]})
                for sample in batch.samples
                if sample.weight != 0 and sample.chain in scored
            ],
            "images": {name: batch.images[name] for name in names},
        }
    )
    return PackedBatch.model_construct(
        batch=own,
        packs=[
            PackNodes.model_construct(
                nodes=int32s(
                    value
                    for node in pack.nodes
                    for value in (node.parent, place[chains[node.sequence]], node.begin, node.end)
                ),
                ends=int32s(
                    value
                    for sequence, node in pack.ends
                    for value in (place[chains[sequence]], node)
                ),
            )
            for pack in packs
        ],
    )


def shares_of(
    batch: Batch,
    looked_back: Batch,
    weights: LossShares,
    policy: LoadedPolicy,
    *,
    rate: float,
    policy_version: int | None,
    looked_back_version: int | None,
    pack_tokens: int,
    ranks: int = 1,
    looks: bool = False,
) -> list[Share]:
    """Return what each rank does for the update on `batch`; `weights` are of its whole loss.

    `looked_back` are the samples that are first compared with weights other than the present ones, those
    of `looked_back_version` (parity.py).
    """
    works = packed_batches(batch, policy, pack_tokens=pack_tokens, ranks=ranks)
    pad = pad_of(policy)
    others = packed_batches(looked_back, policy, pack_tokens=pack_tokens, ranks=ranks)
    return [
        Share.model_construct(
            work=work,
            looked_back=other,
            looked_back_version=looked_back_version,
            token_weights=float64s(
                sample.weight
                * weights.of(trajectory_of(sample), drawn_tokens(work.batch, sample, pad))
                for sample in work.batch.samples
            ),
            divisor=weights.divisor,
            rate=rate,
            policy_version=policy_version,
            samples=len(batch.samples),
            tokens=completion_tokens(batch, pad),
            looks=looks,
        )
        for work, other in zip(works, others, strict=True)
    ]
