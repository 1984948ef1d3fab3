"""Conversion of batches to single steps with whole prompts and back, so that a test can change a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bus.messages import Batch
from bus.packed import float64s, int32s
from dart_cli.data.loading import chained
from dart_cli.data.store.steps import BatchStep


def steps_of(batch: Batch) -> list[BatchStep]:
    """Return the steps of a batch, in the order of its samples."""
    return [
        BatchStep(
            group_id=sample.group_id,
            trajectory_id=sample.trajectory_id,
            step=sample.step,
            prompt_token_ids=batch.prompt(sample),
            token_ids=batch.completion(sample),
            image_hashes=batch.image_hashes(sample),
            behaviour_logprobs=sample.behaviour_logprobs,
            version_spans=sample.version_spans,
            advantage=sample.advantage,
            weight=sample.weight,
            patches=sample.patches,
        )
        for sample in batch.samples
    ]


def with_steps(batch: Batch, steps: Sequence[BatchStep]) -> Batch:
    """Return the batch with other steps."""
    chains, samples = chained(steps)
    return batch.model_copy(update={"chains": chains, "samples": samples})


def with_changes(step: BatchStep, **changes: object) -> BatchStep:
    """Return `step` with `changes`; numbers may be lists."""
    for name, make in {
        "prompt_token_ids": int32s,
        "token_ids": int32s,
        "behaviour_logprobs": float64s,
    }.items():
        if name in changes:
            changes[name] = make(changes[name])  # type: ignore[operator]
    return replace(step, **changes)  # type: ignore[arg-type]


def with_changed_steps(batch: Batch, change: Callable[[BatchStep], dict[str, object]]) -> Batch:
    """Return the batch with each of its steps changed by `change`."""
    return with_steps(batch, [with_changes(step, **change(step)) for step in steps_of(batch)])
