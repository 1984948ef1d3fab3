"""The parts of a batch that the ranks train on; rank 0 makes them for all ranks.

    packed_batches   a batch -> for each rank its samples, and the packs in which it scores them
    hinted_parts     the parts of the ranks -> the same with hints in their prompts, for a teacher
    shares_by_rank   a batch -> the Share of each rank, with all that the rank needs for the update

Which samples are in one pack, and on which rank, changes no number of the update (except for the order in
which gradients are added): divisors are of the whole batch, and the results of all ranks are added up before
anything is decided (dart_cli/train/rank_group.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bus.messages import Batch, Chain, Sample
from bus.packed import float64s, int32s
from bus.ranks import PackedBatch, PackNodes, Share
from dart_cli.algo.objective import LossWeights
from dart_cli.policy.experts import RoutingShape
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.policy.state_plan import StateShape
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
    """Return the part of each rank; samples of weight 0 are left out. `check_batch` must have passed."""
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
    """Return the packs of one rank, with the chains, samples and images of the batch that they need.

    `cut` maps the index of a chain in the batch to the chain, cut behind its last sample. `chains` maps the
    index of a sequence in the plan to the index of its chain in the batch.
    """
    scored = {chains[sequence] for pack in packs for sequence, _ in pack.ends}
    indices = sorted(scored | {chains[node.sequence] for pack in packs for node in pack.nodes})
    place = {chain: index for index, chain in enumerate(indices)}
    names = {name: None for chain in indices for name in cut[chain].image_hashes}
    own = batch.model_copy(
        update={
            "chains": [cut[chain] for chain in indices],
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
    earlier: Batch,
    weights: LossWeights,
    policy: LoadedPolicy,
    *,
    rate: float,
    policy_version: int | None,
    earlier_version: int | None,
    pack_tokens: int,
    ranks: int = 1,
    has_hints: bool = False,
    tests_sight: bool = False,
) -> list[Share]:
    """Return the share of each rank in the update on `batch`; `weights` are of the whole batch's loss.

    `earlier` are samples that are first scored with the weights of `earlier_version` in place of the present
    ones (dart_cli/train/logprob_check.py). With `has_hints` a teacher scores the steps with their hints. With
    `tests_sight` each rank scores one pack once more, with grey screens.
    """
    works = packed_batches(batch, policy, pack_tokens=pack_tokens, ranks=ranks)
    pad = pad_of(policy)
    hinted = hinted_parts(works, policy, pack_tokens) if has_hints else [_empty(batch)] * ranks
    earlier_parts = packed_batches(earlier, policy, pack_tokens=pack_tokens, ranks=ranks)
    return [
        Share.model_construct(
            work=work,
            hinted=hinted_part,
            looked_back=earlier_part,
            looked_back_version=earlier_version,
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
            looks=tests_sight,
        )
        for work, hinted_part, earlier_part in zip(works, hinted, earlier_parts, strict=True)
    ]


def hinted_parts(
    works: Sequence[PackedBatch], policy: LoadedPolicy, pack_tokens: int
) -> list[PackedBatch]:
    """Return each rank's steps that have hints, with the hints in their prompts, in packs of their own.

    Every rank gets equally many packs: a filler computes a pack of the rank, or of another one, and scores
    nothing.
    """
    parts = []
    for work in works:
        hinted = hinted_batch(work.batch, policy.max_positions)
        parts += packed_batches(hinted, policy, pack_tokens=pack_tokens)
    count = max(len(part.packs) for part in parts)
    whole = next((part for part in parts if part.packs), None)
    if whole is None:
        return parts
    for index, part in enumerate(parts):
        like = part if part.packs else whole
        filler = PackNodes.model_construct(nodes=like.packs[-1].nodes, ends=int32s([]))
        batch = part.batch
        if not part.packs:
            batch = whole.batch.model_copy(update={"samples": []})
        packs = [*part.packs, *[filler] * (count - len(part.packs))]
        parts[index] = PackedBatch.model_construct(batch=batch, packs=packs)
    return parts


def hinted_batch(batch: Batch, most: int) -> Batch:
    """Return the steps of a batch that have hints, each once, as chains with the hint in the prompt.

    Steps that would then have more than `most` tokens are left out.
    """
    chains: list[Chain] = []
    samples: dict[tuple[str, int], Sample] = {}
    for sample in batch.samples:
        key, hint = (sample.trajectory_id, sample.step), sample.hint
        if hint is None or key in samples:
            continue
        prompt = batch.prompt(sample)
        prompt = prompt[: hint.start] + hint.token_ids + prompt[hint.end :]
        tokens = prompt + batch.completion(sample)
        if len(tokens) > most:
            continue
        samples[key] = sample.model_copy(
            update={
                "chain": len(chains),
                "start": len(prompt),
                "end": len(tokens),
                "behaviour_logprobs": float64s([]),
                "version_spans": [],
                "hint": None,
            }
        )
        images = batch.image_hashes(sample)
        chains.append(Chain.model_construct(token_ids=tokens, image_hashes=images))
    return batch.model_copy(update={"chains": chains, "samples": list(samples.values())})


def _empty(batch: Batch) -> PackedBatch:
    none: dict[str, Any] = {"chains": [], "samples": [], "images": {}}
    return PackedBatch.model_construct(batch=batch.model_copy(update=none), packs=[])


def _cut_chain(chain: Chain, length: int, image_token: int, sizes: Mapping[str, int]) -> Chain:
    """Return the first `length` tokens of a chain with their images.

    `sizes` are the numbers of tokens of images, by content hash.
    """
    if length == len(chain.token_ids):
        return chain
    token_ids = chain.token_ids[:length]
    placeholders, names = int((int32_array(token_ids) == image_token).sum()), []
    for name in chain.image_hashes:
        if placeholders > 0:
            names.append(name)
            placeholders -= sizes[name]
    routing = chain.routing[: len(chain.routing) // len(chain.token_ids) * length]
    cut = {"token_ids": token_ids, "image_hashes": names, "routing": routing}
    return chain.model_copy(update=cut)


def _tokens_of(
    chain: Chain, image_token: int, numbers: Mapping[str, int], sizes: Mapping[str, int]
) -> Tokens:
    """Return a chain as the plan reads it: the tokens of an image have an id that identifies the image.

    `numbers` and `sizes` are by content hash: a number that identifies the image, and its number of tokens.
    """
    token_ids = int32_array(chain.token_ids)
    tokens = token_ids.astype(np.uint32)
    counts = [sizes[name] for name in chain.image_hashes]
    images = np.array([IMAGE + numbers[name] for name in chain.image_hashes], dtype=np.uint32)
    tokens[token_ids == image_token] = images.repeat(counts)
    return tokens


def _costs_of(policy: LoadedPolicy) -> Costs:
    """Return the floating-point operations of a forward pass.

    These are two for each weight that a token meets, and four for each pair of tokens, attention head and
    channel of the head (arXiv 2001.08361 section 2.1).
    """
    inner: Any = policy.model.model
    text: Any = policy.model.config.get_text_config()
    heads = int(text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    language = sum(weight.numel() for weight in inner.language_model.layers.parameters())
    if (routing := RoutingShape.of(policy.model)) is not None:  # a token passes some of the experts
        stacked = sum(
            weight.numel()
            for layer in inner.language_model.layers
            for weight in layer.mlp.experts.parameters()
        )
        language -= stacked * (routing.experts - routing.per_token) // routing.experts
    tower = sum(weight.numel() for weight in inner.visual.blocks.parameters())
    recurrent = StateShape.of(policy.model)  # these layers have no pairs
    attending = int(text.num_hidden_layers) - (len(recurrent.layers) if recurrent else 0)
    return Costs(
        token=2.0 * language,
        pair=4.0 * attending * heads * width,
        image_token=2.0 * tower * policy.images.merge**2,
    )
