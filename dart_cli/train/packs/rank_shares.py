"""The parts of a batch that the ranks train on; rank 0 makes them, for all.

    packed_batches   a batch -> for each rank its samples, and the packs in which it scores them
    shares_by_rank   a batch -> the Share of each rank

Which samples are in one pack, and on which rank, changes no number of the update (up to the order in
which gradients are added): divisors are the whole batch's, and ranks add up their results before
anything is decided (rank_group.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bus.messages import Batch, Chain
from bus.packed import float64s, int32s
from bus.ranks import PackedBatch, PackNodes, Share
from dart_cli.algo.objective import LossWeights
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.train.packs.batch_tokens import (
    completion_tokens,
    drawn_tokens,
    image_sizes,
    int32_array,
    pad_of,
    trajectory_of,
)
from dart_cli.train.packs.plan import IMAGE, Costs, PlannedPack, Tokens, plan


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


def shares_by_rank(
    batch: Batch,
    looked_back: Batch,
    weights: LossWeights,
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
    of `looked_back_version` (logprob_check.py).
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


def _cut_chain(chain: Chain, length: int, image_token: int, sizes: Mapping[str, int]) -> Chain:
    """Return the first `length` tokens, with the images that they show; `sizes` in tokens by content hash."""
    if length == len(chain.token_ids):
        return chain
    token_ids = chain.token_ids[:length]
    left, names = int((int32_array(token_ids) == image_token).sum()), []
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
    token_ids = int32_array(chain.token_ids)
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
