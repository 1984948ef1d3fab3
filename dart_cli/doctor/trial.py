"""A batch of multi-turn trajectories that needs no environment: screens are drawn at random.

    Trial    how many trajectories and steps, at which temperature
    play     an engine's answers as a batch that the trainer can score

Past screens and completions are in the prompts as in a run, on screens of several sizes, beside
prompts of text alone, but for a policy that points. The model's actions have no effect: each screen is drawn at random.
"""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

from bus.messages import ActRequest, Batch, Completion, Sampling, Turn
from bus.packed import float64s, int32s
from dart_cli.data.chains import chained
from dart_cli.data.store.rows import BatchStep
from dart_cli.engines.base import Engine, GenerateRequest, Responder
from dart_cli.engines.completions import completion
from dart_cli.policy.history import History
from dart_cli.policy.model import LoadedPolicy
from envs.base import content_hash

SIZES = ((448, 224), (500, 300), (224, 448))
"""Width and height of the screens, pixels; the odd one is resized for every model."""

HISTORY = History(images=3, turns=4)

_WORDS = ("open", "the", "red", "file", "menu", "save", "search", "page", "blue", "button", "click")


@dataclass(frozen=True)
class Trial:
    """What is played."""

    temperature: float
    max_tokens: int
    trajectories: int = 6
    steps: int = 3  # of each; the third shows three screens
    texts: int = 6  # prompts without a screen
    sizes: Sequence[tuple[int, int]] = SIZES
    seed: int = 0
    deadline_s: float = 600.0  # for all of it


async def play(policy: LoadedPolicy, engine: Engine, responder: Responder, trial: Trial) -> Batch:
    """All trajectories at once. Raises EngineError, and TimeoutError past the deadline.

    `policy` renders the prompts of text; its weights are not used. One that points has no such prompts.
    """
    images: dict[str, bytes] = {}
    texts = trial.texts if policy.pointing == "text" else 0  # there is no screen to point at
    async with asyncio.timeout(trial.deadline_s):
        parts = await asyncio.gather(
            *(
                _trajectory(responder, trial, number, images)
                for number in range(trial.trajectories)
            ),
            *(_text(policy, engine, trial, number) for number in range(texts)),
        )
    chains, samples = chained([step for part in parts for step in part])
    return Batch(
        batch_id=1 + trial.seed,
        group_ids=["trial"],
        temperature=trial.temperature,
        chains=chains,
        samples=samples,
        images=images,
    )


async def _trajectory(
    responder: Responder, trial: Trial, number: int, images: dict[str, bytes]
) -> list[BatchStep]:
    rng = random.Random(f"{trial.seed} {number}")  # noqa: S311 - no secret
    width, height = trial.sizes[number % len(trial.sizes)]
    instruction = _instruction(rng)
    turns: list[Turn] = []
    steps: list[BatchStep] = []
    for step in range(trial.steps):
        screen = draw(rng, width, height)
        visible = HISTORY.visible(turns)
        said = await responder.answer(
            ActRequest(
                trajectory_id=f"trial-{number}",
                step=step,
                instruction=instruction,
                turns=visible,
                screenshot=screen,
                width=width,
                height=height,
                sampling=_sampling(trial, rng),
            )
        )
        shown = [turn.screenshot for turn in visible if turn.screenshot is not None] + [screen]
        images.update({content_hash(blob): blob for blob in shown})
        steps.append(_step(f"trial-{number}", step, said, shown, rng))
        turns.append(Turn(text=said.text, screenshot=screen, token_ids=said.sampled.token_ids))
    return steps


async def _text(policy: LoadedPolicy, engine: Engine, trial: Trial, number: int) -> list[BatchStep]:
    """One completion of a prompt without a screen, which a run never asks for."""
    rng = random.Random(f"{trial.seed} text {number}")  # noqa: S311 - no secret
    content = [{"type": "text", "text": _instruction(rng)}]
    text = policy.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    prompt = list(policy.tokenizer.encode(text, add_special_tokens=False))
    name = f"text-{trial.seed}-{number}"
    generation = await engine.generate(GenerateRequest(name, prompt, [], _sampling(trial, rng)))
    return [_step(name, 0, completion(prompt, generation, ""), [], rng)]


def _step(
    trajectory: str, step: int, said: Completion, shown: Sequence[bytes], rng: random.Random
) -> BatchStep:
    return BatchStep(
        group_id=trajectory,
        trajectory_id=trajectory,
        step=step,
        prompt_token_ids=int32s(said.prompt_token_ids),
        token_ids=int32s(said.sampled.token_ids),
        image_hashes=[content_hash(blob) for blob in shown],
        behaviour_logprobs=float64s(said.sampled.behaviour_logprobs),
        version_spans=said.sampled.version_spans,
        advantage=rng.uniform(-1.5, 1.5),
        weight=1.0,
        patches=said.sampled.patches,
    )


def _sampling(trial: Trial, rng: random.Random) -> Sampling:
    return Sampling(
        temperature=trial.temperature, max_tokens=trial.max_tokens, seed=rng.getrandbits(32)
    )


def _instruction(rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randint(4, 9)))


def draw(rng: random.Random, width: int, height: int) -> bytes:
    """A PNG of boxes on a plain background, different each time."""
    image = Image.new("RGB", (width, height), _colour(rng))
    pen = ImageDraw.Draw(image)
    for _ in range(rng.randint(6, 14)):
        left, top = rng.randrange(width), rng.randrange(height)
        right = left + rng.randint(8, width // 2)
        pen.rectangle((left, top, right, top + rng.randint(8, height // 3)), fill=_colour(rng))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _colour(rng: random.Random) -> tuple[int, int, int]:
    return rng.randrange(256), rng.randrange(256), rng.randrange(256)
