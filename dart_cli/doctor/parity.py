"""Engine against trainer on a model folder, without a run: `dart doctor --parity`.

    parity       findings: how far the log-probabilities of the same tokens are apart, by screens shown
    judge        the same for tokens that are compared already
    Trial        how many trajectories and steps are played for it, at which temperature
    play_trial   an engine's answers as a batch that the trainer can score

The configured engine plays a trial with the model as it comes and is closed; then the trainer's forward pass
scores what it sampled. So two copies of the model are never in memory at once. A trial needs no environment:
screens of several sizes are drawn at random, past ones and completions are in the prompts as in a run, beside
prompts of text alone, but for a policy that points.
"""

from __future__ import annotations

import asyncio
import gc
import io
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

from bus.errors import DartError
from bus.messages import ActRequest, Batch, Completion, Sampling, Turn
from bus.packed import float64s, int32s
from dart_cli.config.rules import Finding
from dart_cli.config.schema import MODEL_ENGINES, Config
from dart_cli.data.loading import chained
from dart_cli.data.store.steps import BatchStep
from dart_cli.doctor.findings import error, ok, warning
from dart_cli.engines.base import Engine, GenerateRequest, Responder
from dart_cli.engines.completions import completion
from dart_cli.engines.responder import PolicyResponder
from dart_cli.policy.history import History
from dart_cli.policy.model import LoadedPolicy
from dart_cli.runtime.role import limit_threads
from dart_cli.train.model import TrainModel
from dart_cli.train.parity import LEAST_TOKENS, ComparedTokens, alarm_of, limit_of, rescore
from envs.base import content_hash

MOST_TOKENS = 64
"""A completion's bound, if rollout.max_tokens is larger: enough to compare."""

_NAMES = {"text": "no screen", "one": "one screen", "several": "several screens"}


def parity(config: Config) -> Iterator[Finding]:
    """Sample with the engine, score with the trainer, compare. Needs no other process."""
    if config.rollout.engine not in MODEL_ENGINES or config.train.learner != "torch":
        yield warning(
            "parity",
            f"nothing to compare: engine {config.rollout.engine}, learner {config.train.learner}",
            'set rollout.engine = "transformers" or "vllm" and train.learner = "torch"',
        )
        return
    limit_threads(config.rollout.threads)
    began = time.monotonic()
    try:
        batch = asyncio.run(sample(config))
        gc.collect()  # the engine's copy of the model
        sampled_s = time.monotonic() - began
        model = TrainModel.load(config)
        compared = rescore(model, batch, config.train.pack_tokens)
    except DartError as fault:
        yield error("parity", str(fault), "fix that, run dart doctor again")
        return
    except TimeoutError:
        yield error(
            "parity",
            f"not over after {time.monotonic() - began:.0f} s",
            "lower rollout.max_tokens, or find out what the engine waits for",
        )
        return
    yield ok(
        "parity",
        f"engine {config.rollout.engine} sampled {compared.engine.size} tokens of {config.model.path} "
        f"in {config.model.dtype} at temperature {config.rollout.temperature:g}, loaded and played in "
        f"{sampled_s:.1f} s",
    )
    yield from judge(compared, limit_of(model))


async def sample(config: Config) -> Batch:
    """What the configured engine samples in a trial."""
    # Here, since scripts/gpu-check draws screens where no bus is installed.
    from dart_cli.doctor.play import LOAD_S
    from dart_cli.player.model import loaded_model

    async with loaded_model(config, None, -1, load_s=LOAD_S) as model:
        assert isinstance(model.responder, PolicyResponder)
        trial = Trial(
            temperature=config.rollout.temperature,
            max_tokens=min(config.rollout.max_tokens, MOST_TOKENS),
        )
        return await play_trial(model.responder.policy, model.engine, model.responder, trial)


def judge(compared: ComparedTokens, limit: float) -> Iterator[Finding]:
    """A line for each kind of prompt; one error where the means are beyond `limit`, nats."""
    for kind, each in compared.by_seen().items():
        text = (
            f"{_NAMES[kind]:<16}{each.tokens:>5} tokens  |difference| mean {each.mean:.2e}  half "
            f"<= {each.p50:.2e}  99 % <= {each.p99:.2e}  max {each.max:.2e} nats  k3 KL {each.kl:.2e}"
        )
        beyond = not each.mean <= limit
        few = each.tokens < LEAST_TOKENS
        cure = "see below" if not few else f"too few tokens to judge by: {LEAST_TOKENS} are needed"
        yield Finding("parity", "warning" if beyond else "ok", text, cure if beyond else "")
    alarm = alarm_of(compared, limit)
    if alarm:
        problem, _, cure = alarm.partition(". ")
        yield error("parity", problem, cure)
    else:
        yield ok("parity", f"they agree: every mean is within {limit:g} nats")


# --- the trial ------------------------------------------------------------------------------

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


async def play_trial(
    policy: LoadedPolicy, engine: Engine, responder: Responder, trial: Trial
) -> Batch:
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
