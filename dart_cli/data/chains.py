"""Steps of a batch to chains, so that each token travels once.

    chained         the steps of a batch -> its chains, and a sample for each step
    chained_of      the same of steps that are read one after another, so that few are held at once
    reading_order   the order in which that reads them

A step extends the one before of its trajectory where its prompt is exactly that one's prompt and
completion, and more, and its images are that one's, and perhaps more. Consecutive steps that do are
one chain: the tokens of the last, in which each has its place. A step that the batch leaves out does
not break a chain: the prompts after it still hold its completion. Where history drops a screen, or
renders a past turn in another way, the next chain begins. A fork, which answers a step's prompt with
another trajectory's completion, is a chain of its own; the trainer's packs share the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bus.messages import Chain, Sample
from bus.packed import int32s, little_endian
from dart_cli.data.store.rows import BatchStep, PlannedSample


@dataclass(frozen=True)
class _Place:
    """Where a step is."""

    trajectory_id: str
    step: int
    chain: int
    start: int
    end: int


def chained(steps: Sequence[BatchStep]) -> tuple[list[Chain], list[Sample]]:
    """(chains, samples) of steps, one sample each, in their order.

    A trajectory that is compared in several groups is in the chains once.
    """
    order = reading_order(steps)
    return chained_of((steps[index] for index in order), order)


def chained_of(
    steps: Iterable[BatchStep], order: Sequence[int]
) -> tuple[list[Chain], list[Sample]]:
    """The same of steps in the `order` of `reading_order`; no prompt is held but the last one's."""
    chains: list[Chain] = []
    samples: list[Sample | None] = [None] * len(order)
    held = b""  # the bytes of the chain that is being made
    shown: list[str] = []  # its images
    at: _Place | None = None  # the step before

    def close() -> None:
        chains.append(Chain.model_construct(token_ids=int32s(held), image_hashes=shown))

    for index, each in zip(order, steps, strict=True):
        is_next = at is not None and at.trajectory_id == each.trajectory_id and not each.is_fork
        if at is None or not is_next or at.step != each.step:
            prompt = little_endian(each.prompt_token_ids)
            extends = (
                is_next and prompt.startswith(held) and each.image_hashes[: len(shown)] == shown
            )
            if at is not None and not extends:
                close()
            held, shown = prompt + little_endian(each.token_ids), each.image_hashes
            start = len(each.prompt_token_ids)
            at = _Place(
                each.trajectory_id, each.step, len(chains), start, start + len(each.token_ids)
            )
        samples[index] = _sample(each, at)
    if at is not None:
        close()
    return chains, [each for each in samples if each is not None]


def reading_order(steps: Sequence[BatchStep] | Sequence[PlannedSample]) -> list[int]:
    """Indices of the steps: the trajectories as they first come, the steps of each from its first.

    Forks come last of all, so that they break no chain.
    """
    first: dict[str, int] = {}
    for each in steps:
        first.setdefault(each.trajectory_id, len(first))

    def place(index: int) -> tuple[bool, int, int, int]:
        each = steps[index]
        return each.is_fork, first[each.trajectory_id], each.step, index

    return sorted(range(len(steps)), key=place)


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
        patches=step.patches,
    )
