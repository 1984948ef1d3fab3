"""Steps of a batch to chains, so that each token travels once.

    chained   the steps of a batch -> its chains, and a sample for each step

A step extends the one before of its trajectory where its prompt is exactly that one's prompt and
completion, and more, and its images are that one's, and perhaps more. Consecutive steps that do are
one chain: the tokens of the last, in which each has its place. A step that the batch leaves out does
not break a chain: the prompts after it still hold its completion. Where history drops a screen, or
renders a past turn in another way, the next chain begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bus.messages import Chain, Sample
from bus.packed import little_endian
from dart_cli.data.store.rows import BatchStep


@dataclass(frozen=True)
class _Place:
    """Where a step is."""

    chain: int
    start: int
    end: int


def chained(steps: Sequence[BatchStep]) -> tuple[list[Chain], list[Sample]]:
    """(chains, samples) of steps, one sample each, in their order.

    A trajectory that is compared in several groups is in the chains once.
    """
    by_trajectory: dict[str, dict[int, BatchStep]] = {}
    for each in steps:
        by_trajectory.setdefault(each.trajectory_id, {}).setdefault(each.step, each)
    chains: list[Chain] = []
    places: dict[tuple[str, int], _Place] = {}
    for name, distinct in by_trajectory.items():
        last: BatchStep | None = None
        held = b""  # the bytes of the chain that is being made
        for step in sorted(distinct):
            each = distinct[step]
            prompt = little_endian(each.prompt_token_ids)
            extends = (
                last is not None
                and prompt.startswith(held)
                and each.image_hashes[: len(last.image_hashes)] == last.image_hashes
            )
            held = prompt + little_endian(each.token_ids)
            last = each
            chain = Chain.model_construct(
                token_ids=each.prompt_token_ids + each.token_ids, image_hashes=each.image_hashes
            )
            if extends:
                chains[-1] = chain
            else:
                chains.append(chain)
            start = len(each.prompt_token_ids)
            places[name, step] = _Place(len(chains) - 1, start, start + len(each.token_ids))
    return chains, [_sample(each, places[each.trajectory_id, each.step]) for each in steps]


def _sample(step: BatchStep, place: _Place) -> Sample:
    # Each value was validated when it came in: building 500 samples again need not repeat it.
    return Sample.model_construct(
        group_id=step.group_id,
        trajectory_id=step.trajectory_id,
        step=step.step,
        chain=place.chain,
        start=place.start,
        end=place.end,
        images=len(step.image_hashes),
        behaviour_logprobs=step.behaviour_logprobs,
        version_spans=step.version_spans,
        advantage=step.advantage,
        weight=step.weight,
    )
