"""What the steps of a planned batch hold, as the trainer gets it: each token once.

    load            a BatchPlan -> the batch, read on any connection; takes seconds
    chained         the steps of a batch -> its chains, and a sample for each step
    reading_order   the order in which that reads them
    BatchLoader     loads and encodes in a thread of its own, so that data's event loop goes on answering

A step extends the one before of its trajectory where its prompt is exactly that one's prompt and
completion, and more, and its images are that one's, and perhaps more. Consecutive steps that do are
one chain: the tokens of the last, in which each has its place. A step that the batch leaves out does
not break a chain: the prompts after it still hold its completion. Where history drops a screen, or
renders a past turn in another way, the next chain begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bus.codec import encode
from bus.errors import ConfigError, OversizeError
from bus.messages import Batch, BatchReply, Chain, Sample
from bus.packed import int32s, little_endian
from dart_cli.data.store.rows import PlannedSample
from dart_cli.data.store.steps import BatchStep

if TYPE_CHECKING:  # scripts/gpu-check makes chains where neither a bus nor a database is installed
    from bus.requests import EncodedReply
    from dart_cli.data.batches import BatchPlan
    from dart_cli.data.store.reader import Reader


def load(reader: Reader, plan: BatchPlan) -> Batch:
    """Return what the planned steps hold, with their screens; reads nothing but trajectories' steps.

    Raises ConfigError if it cannot be sent.
    """
    order = reading_order(plan.samples)
    steps = reader.planned_steps([plan.samples[index] for index in order])
    chains, samples = chained_of(steps, order)
    hashes = (name for chain in chains for name in chain.image_hashes)
    batch = Batch.model_construct(
        batch_id=plan.batch_id,
        group_ids=list(plan.group_ids),
        temperature=plan.temperature,
        run_s=plan.standing.run_s,
        trajectories=plan.standing.trajectories,
        reuse=plan.reuse,
        chains=chains,
        samples=samples,
        images=reader.screenshots(hashes),
        ages=[],
    )
    _check_size(batch, is_filed=plan.is_filed)
    return batch


def chained(steps: Sequence[BatchStep]) -> tuple[list[Chain], list[Sample]]:
    """(chains, samples) of steps, one sample each, in their order.

    A trajectory that is compared in several groups is in the chains once.
    """
    order = reading_order(steps)
    return chained_of((steps[index] for index in order), order)


def reading_order(steps: Sequence[BatchStep] | Sequence[PlannedSample]) -> list[int]:
    """Return indices of the steps: the trajectories as they first come, the steps of each from its first."""
    first: dict[str, int] = {}
    for each in steps:
        first.setdefault(each.trajectory_id, len(first))

    def place(index: int) -> tuple[int, int, int]:
        each = steps[index]
        return first[each.trajectory_id], each.step, index

    return sorted(range(len(steps)), key=place)


@dataclass(frozen=True)
class _Place:
    """Where a step is."""

    trajectory_id: str
    step: int
    chain: int
    start: int
    end: int


def chained_of(
    steps: Iterable[BatchStep], order: Sequence[int]
) -> tuple[list[Chain], list[Sample]]:
    """(chains, samples) of steps in `reading_order`; no prompt is held but the last one's."""
    chains: list[Chain] = []
    samples: list[Sample | None] = [None] * len(order)
    held = b""  # the bytes of the chain that is being made
    shown: list[str] = []  # its images
    at: _Place | None = None  # the step before

    def close() -> None:
        chains.append(Chain.model_construct(token_ids=int32s(held), image_hashes=shown))

    for index, each in zip(order, steps, strict=True):
        is_next = at is not None and at.trajectory_id == each.trajectory_id
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
        worker=step.worker,
        reward=step.reward,
        expected=step.baseline,
    )


def _check_size(batch: Batch, *, is_filed: bool) -> None:
    """Raise ConfigError if the batch is larger than a message may be."""
    try:
        encode(BatchReply.model_construct(batch=batch, retry_after_s=0.0, reason=""))
    except OversizeError as error:
        groups = len(batch.group_ids)
        if is_filed:
            cure = "it is filed already: choose another run.dir, with a lower data.groups_per_batch"
        elif groups > 1:
            cure = f"lower data.groups_per_batch, now {groups}, and start dart data and train again"
        else:
            cure = "choose another run.dir, with a lower data.group_size or smaller screenshots"
        raise ConfigError(
            f"batch {batch.batch_id} of {groups} groups, {len(batch.samples)} steps and "
            f"{len(batch.images)} screenshots cannot be sent to the trainer: {error}; {cure}"
        ) from None


class BatchLoader:
    """Reads what is committed. Call `close`.

    A batch of 1,440 full-HD steps is a gigabyte: it takes seconds to read, and environments wait for each
    of their steps to be acknowledged.
    """

    def __init__(self, path: Path) -> None:
        """`path` is the run's database."""
        self._path = path
        self._thread = ThreadPoolExecutor(1, "batches")
        self._reader: Reader | None = None  # made, used and closed in the thread alone

    async def load(self, plan: BatchPlan) -> Batch:
        """Return what the planned steps hold. Raises ConfigError as `load` does, and StoreError."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._load, plan)

    async def encoded(self, batch: Batch) -> EncodedReply:
        """Return the answer that carries the batch: thousands of frames. Raises as `encode` does."""
        from bus.requests import EncodedReply

        reply = BatchReply.model_construct(batch=batch, retry_after_s=0.0, reason="")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, EncodedReply.of, reply)

    def close(self) -> None:
        """Wait for what is being loaded, and close the connection."""
        self._thread.submit(self._close)
        self._thread.shutdown()

    def _load(self, plan: BatchPlan) -> Batch:
        from dart_cli.data.store.reader import Reader

        if self._reader is None:
            self._reader = Reader(self._path)
        return load(self._reader, plan)

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
