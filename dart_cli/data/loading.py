"""Load the steps of a planned batch, as the trainer gets them: each token once.

    load            reads the batch of a BatchPlan on any connection to the database; this takes seconds
    chained         makes chains and samples of the steps of a batch
    chained_of      makes chains and samples of steps that are read one after the other, in `reading_order`
    reading_order   returns the order in which `chained_of` must get the steps

A step extends the previous step of its trajectory if its prompt begins with that step's prompt and
completion, and its images begin with that step's images. Consecutive steps that extend one another form a
chain: the tokens of the last step, in which each step has its place. A step that the batch leaves out does
not break a chain, since later prompts still contain its completion. A new chain begins where the history
drops a screen, or renders a past turn in another way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bus.codec import encode
from bus.errors import ConfigError, OversizeError
from bus.messages import Batch, BatchReply, Chain, Sample
from bus.packed import int32s, little_endian
from dart_cli.data.store.rows import PlannedSample
from dart_cli.data.store.steps import BatchStep

if TYPE_CHECKING:  # scripts/gpu-check makes chains where no database is installed
    from dart_cli.data.batches import BatchPlan
    from dart_cli.data.store.reader import Reader


def load(reader: Reader, plan: BatchPlan) -> Batch:
    """Return the planned batch with its tokens and screenshots, but without ages, reward and success.

    It reads steps and screenshots only, and these no longer change. Raises ConfigError if the batch is larger
    than a message may be.
    """
    order = reading_order(plan.samples)
    steps = reader.planned_steps([plan.samples[index] for index in order])
    chains, samples = chained_of(steps, order)
    hashes = (image_hash for chain in chains for image_hash in chain.image_hashes)
    batch = Batch.model_construct(
        batch_id=plan.batch_id,
        group_ids=list(plan.group_ids),
        temperature=plan.temperature,
        run_s=plan.totals.run_s,
        trajectories=plan.totals.trajectories,
        reuse=plan.reuse,
        chains=chains,
        samples=samples,
        images=reader.screenshots(hashes),
        ages=[],
    )
    _check_size(batch, is_filed=plan.is_filed)
    return batch


def chained(steps: Sequence[BatchStep]) -> tuple[list[Chain], list[Sample]]:
    """Return the chains of the steps, and one sample for each step in the given order.

    If a trajectory is compared in several groups, its tokens are in the chains once.
    """
    order = reading_order(steps)
    return chained_of((steps[index] for index in order), order)


def reading_order(steps: Sequence[BatchStep] | Sequence[PlannedSample]) -> list[int]:
    """Return the indices of the steps by trajectory, in order of appearance, each from its first step."""
    rank: dict[str, int] = {}
    for step in steps:
        rank.setdefault(step.trajectory_id, len(rank))

    def key(index: int) -> tuple[int, int, int]:
        step = steps[index]
        return rank[step.trajectory_id], step.step, index

    return sorted(range(len(steps)), key=key)


@dataclass(frozen=True)
class _Place:
    """The place of a step: a chain, and the tokens of its completion there."""

    trajectory_id: str
    step: int
    chain: int
    start: int
    end: int


def chained_of(
    steps: Iterable[BatchStep], order: Sequence[int]
) -> tuple[list[Chain], list[Sample]]:
    """Return the chains and samples of steps that come in `order`, which is their `reading_order`.

    Only one prompt is in memory at a time. The samples are in the steps' original order.
    """
    chains: list[Chain] = []
    samples: list[Sample | None] = [None] * len(order)
    tokens = b""  # of the chain that is being made, as bytes
    routing, routed = b"", 0  # of its first tokens, and how many they are
    images: list[str] = []  # its image hashes
    previous: _Place | None = None

    def close() -> None:
        token_ids = int32s(tokens)
        whole = routing + bytes(
            (len(token_ids) - routed) * (len(routing) // routed) if routed else 0
        )
        chains.append(
            Chain.model_construct(token_ids=token_ids, image_hashes=images, routing=whole)
        )

    for index, step in zip(order, steps, strict=True):
        is_same = previous is not None and previous.trajectory_id == step.trajectory_id
        # A step that is compared in several groups comes several times, and keeps its place.
        if previous is None or not is_same or previous.step != step.step:
            prompt = little_endian(step.prompt_token_ids)
            is_extension = (
                is_same and prompt.startswith(tokens) and step.image_hashes[: len(images)] == images
            )
            if previous is not None and not is_extension:
                close()
                routing, routed = b"", 0
            tokens, images = prompt + little_endian(step.token_ids), step.image_hashes
            if step.routing:
                # Each token keeps the experts with which its step predicted the next token.
                routing += step.routing[len(routing) :]
                routed = len(step.prompt_token_ids) + len(step.token_ids) - 1
            start = len(step.prompt_token_ids)
            previous = _Place(
                trajectory_id=step.trajectory_id,
                step=step.step,
                chain=len(chains),
                start=start,
                end=start + len(step.token_ids),
            )
        samples[index] = _sample(step, previous)
    if previous is not None:
        close()
    return chains, [sample for sample in samples if sample is not None]


def _sample(step: BatchStep, place: _Place) -> Sample:
    # Each value was validated when it was filed; with 500 samples a batch it is not validated again.
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
        worker=step.worker,
        reward=step.reward,
        expected=step.baseline,
        hint=step.hint,
    )


def _check_size(batch: Batch, *, is_filed: bool) -> None:
    """Raise ConfigError if the batch is larger than a message may be."""
    try:
        encode(BatchReply.model_construct(batch=batch, retry_after_s=0.0, reason=""))
    except OversizeError as error:
        groups = len(batch.group_ids)
        if is_filed:
            fix = "it is filed already: choose another run.dir, with a lower data.groups_per_batch"
        elif groups > 1:
            fix = f"lower data.groups_per_batch, now {groups}, and start dart data and train again"
        else:
            fix = "choose another run.dir, with a lower data.group_size or smaller screenshots"
        raise ConfigError(
            f"batch {batch.batch_id} of {groups} groups, {len(batch.samples)} steps and "
            f"{len(batch.images)} screenshots cannot be sent to the trainer: {error}; {fix}"
        ) from None
