"""The messages that environment slots submit, for benchmarks/data_bus/store.py: steps, ends, screenshots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from bus.messages import Lease, SampledTokens, StepRecord, TrajectoryEnd, VersionSpan
from envs.contract.blobs import content_hash

SLOTS = 16
"""Environment slots that play at once, so that their steps come in turn."""
STEPS = 8
COMPLETION_TOKENS = 70
HISTORY_IMAGES = 5
T = TypeVar("T")


@dataclass(frozen=True)
class ScreenSize:
    """A size of screenshots: what one takes on the wire, and in a prompt."""

    name: str
    encoded: int  # bytes
    tokens: int  # image placeholders of one screenshot
    share: float  # of --trajectories that are played at this size


SCREENS = (ScreenSize("448x336", 20_000, 192, 1.0), ScreenSize("1920x1080", 300_000, 2_691, 0.5))


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield parts of `size` items; the last one may be shorter."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def messages_of_play(
    leases: Sequence[Lease], screen: ScreenSize
) -> Iterator[StepRecord | TrajectoryEnd]:
    """Yield what SLOTS environments submit that play these leases: every other one passes."""
    rng = Random(0)
    for playing in chunks(leases, SLOTS):
        hashes_by_trajectory: dict[str, list[str]] = {
            episode.trajectory_id: [] for episode in playing
        }
        for step in range(STEPS):
            for episode in playing:
                image = b"\x89PNG" + rng.randbytes(screen.encoded - 4)
                hashes = hashes_by_trajectory[episode.trajectory_id]
                hashes.append(content_hash(image))
                yield step_of(
                    episode, step, image, hashes[-HISTORY_IMAGES:], prompt(screen, step, rng)
                )
        for number, episode in enumerate(playing):
            last = b"\x89PNG" + rng.randbytes(screen.encoded - 4)
            yield end_of(episode, STEPS, "pass" if number % 2 else "fail", last)


def prompt(screen: ScreenSize, step: int, rng: Random) -> list[int]:
    """Return the token ids [P] of a prompt with the images and texts of the past."""
    images = min(step + 1, HISTORY_IMAGES)
    text = [rng.randrange(150_000) for _ in range(400 + COMPLETION_TOKENS * step)]
    return text + [151_655] * (images * screen.tokens)


def step_of(
    lease: Lease, step: int, image: bytes, hashes: Sequence[str], prompt: list[int]
) -> StepRecord:
    """Return one step whose completion has COMPLETION_TOKENS tokens."""
    rng = Random(step)
    length = COMPLETION_TOKENS
    return StepRecord(
        trajectory_id=lease.trajectory_id,
        step=step,
        screenshot=image,
        media_type="image/png",
        image_hashes=list(hashes),
        prompt_token_ids=prompt,
        sampled=SampledTokens(
            token_ids=[rng.randrange(150_000) for _ in range(length)],
            behaviour_logprobs=[-rng.random() for _ in range(length)],
            entropies=[rng.random() for _ in range(length)],
            version_spans=[VersionSpan(version=3, start=0, end=length)],
        ),
        worker="rollout-0",
        text="Thought: the button is in the dialog's corner.\nAction: click(start_box='(1,2)')",
        action={"kind": "click", "x": 1, "y": 2, "button": "left"},
        error="",
        model_s=1.5,
        env_s=4.0,
    )


def end_of(lease: Lease, steps: int, outcome: str, image: bytes) -> TrajectoryEnd:
    """Return the end of one trajectory."""
    return TrajectoryEnd.model_validate(
        {
            "trajectory_id": lease.trajectory_id,
            "steps": steps,
            "outcome": outcome,
            "reason": "as the evaluator found",
            "stop_reason": "done",
            "screenshot": image,
            "reset_s": 20.0,
            "wall_s": 60.0,
        }
    )
