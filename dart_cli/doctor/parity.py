"""Engine against trainer on a model folder, without a run: `dart doctor --parity`.

    parity       findings: how far the log-probabilities of the same tokens are apart, by screens shown
    judge        the same for tokens that are compared already
    Trial        how many trajectories and steps are played for it, at which temperature
    RunPrompts   the screens and the history of a run, for one trajectory of the trial
    play_trial   an engine's answers as a batch that the trainer can score

The configured engine plays a trial with the model as it comes and is closed; then the trainer's forward pass
scores what it sampled, with weights in the model's type and nothing to train them by. So two copies of the model
are never in memory at once, and it takes no more than the engine. A trial needs no environment: screens are drawn
at random, past ones and completions are in the prompts as in a run, beside prompts of text alone, but for a policy
that points. Most screens are small. One trajectory has screens as large as the run's, as many as its history
shows: vLLM reads so long a prompt in several parts on a GPU, and a small one at once.
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
from dart_cli.config.screens import run_screen
from dart_cli.data.loading import chained
from dart_cli.data.store.steps import BatchStep
from dart_cli.doctor.findings import error, ok, warning
from dart_cli.engines.base import Engine, GenerateRequest, Responder
from dart_cli.engines.completions import completion
from dart_cli.engines.responder import PolicyResponder
from dart_cli.language.history import History, history_of
from dart_cli.policy.loader import LoadedPolicy, fits
from dart_cli.runtime.role import limit_threads
from dart_cli.train.parity import (
    LEAST_TOKENS,
    ComparedTokens,
    alarm_of,
    limit_of,
    rescore,
)
from dart_cli.train.trained_policy import TrainModel
from envs.contract.blobs import content_hash

MOST_TOKENS = 64
"""A completion's bound, if rollout.max_tokens is larger: enough to compare."""

MOST_SCREENS = 8
"""Screens in a prompt of the run's own size at most, if its history shows more: 21,500 tokens at 1920x1080."""

_NAMES = {"text": "no screen", "one": "one screen", "several": "several screens"}
_OWN, _OWN_NAME = "run's screens", "run"


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
        model = TrainModel.load_frozen(config)
        with fits("the trainer's forward pass", model.policy.device, _FEWER):
            compared, of_run = (
                rescore(model, part, config.train.pack_tokens) for part in parted(batch)
            )
    except DartError as fault:
        problem, _, cure = str(fault).partition("; ")
        yield error("parity", problem, cure or "correct what it names, then run dart doctor again")
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
        f"engine {config.rollout.engine} sampled {compared.engine.size + of_run.engine.size} tokens of {config.model.path} "
        f"in {config.model.dtype} at temperature {config.rollout.temperature:g}, loaded and played in "
        f"{sampled_s:.1f} s",
    )
    yield from judge(compared, limit_of(model), of_run, _shown(config, batch))


async def sample(config: Config) -> Batch:
    """Return what the configured engine samples in a trial."""
    # Here, since scripts/gpu-check draws screens where no bus is installed.
    from dart_cli.doctor.trial_episode import LOAD_S
    from dart_cli.player.chosen_model import loaded_model

    async with loaded_model(config, None, -1, load_s=LOAD_S) as model:
        assert isinstance(model.responder, PolicyResponder)
        trial = Trial(
            temperature=config.rollout.temperature,
            max_tokens=min(config.rollout.max_tokens, MOST_TOKENS),
            run=RunPrompts.of(config),
        )
        return await play_trial(model.responder.policy, model.engine, model.responder, trial)


def judge(
    compared: ComparedTokens,
    limit: float,
    of_run: ComparedTokens | None = None,
    shown: str = "",
) -> Iterator[Finding]:
    """Yield a line for each kind of prompt, and one error where the means are beyond `limit`, nats.

    `of_run` are tokens of prompts as large as the run's, which `shown` tells of.
    """
    kinds = {_NAMES[kind]: each for kind, each in compared.by_seen().items()}
    if of_run is not None and of_run.engine.size:
        kinds[_OWN] = of_run.mismatch()
    for name, each in kinds.items():
        text = (
            f"{name:<16}{each.tokens:>5} tokens  |difference| mean {each.mean:.2e}  half "
            f"<= {each.p50:.2e}  99 % <= {each.p99:.2e}  max {each.max:.2e} nats  k3 KL {each.kl:.2e}"
        )
        if name == _OWN and shown:
            text += f"; {shown}"
        beyond = not each.mean <= limit
        few = each.tokens < LEAST_TOKENS
        cure = "see below"
        if few:
            cure = f"raise rollout.max_tokens: fewer than {LEAST_TOKENS} tokens are too few to judge by"
        yield Finding("parity", "warning" if beyond else "ok", text, cure if beyond else "")
    if alarm := alarm_of(compared, limit):
        problem, _, cure = alarm.partition(". ")
        yield error("parity", problem, cure)
    elif of_run is not None and (alarm := alarm_of(of_run, limit)):
        yield error("parity", f"on prompts of the {_OWN} alone: {alarm.partition('. ')[0]}", _LONG)
    else:
        yield ok("parity", f"they agree: every mean is within {limit:g} nats")


_LONG = (
    "Small prompts agree. vLLM reads long ones in parts of max_num_batched_tokens. With it, compare again with "
    "vllm.options = { enable_chunked_prefill = false, max_num_batched_tokens = N }, where N is "
    "vllm.max_model_len; if they agree then, run with these options and report it"
)
_FEWER = (
    "lower train.pack_tokens or the history of [policy]; `dart doctor CONFIG` says what a run takes"
)


def parted(batch: Batch) -> tuple[Batch, Batch]:
    """Return the batch of the small prompts, and that of the prompts as large as the run's."""
    parts = [
        [each for each in batch.samples if (each.trajectory_id == _OWN_NAME) == own]
        for own in (False, True)
    ]
    small, large = (batch.model_copy(update={"samples": part}) for part in parts)
    return small, large


def _shown(config: Config, batch: Batch) -> str:
    """Say how large the prompts of the run's own size are."""
    prompts, run = RunPrompts.of(config), parted(batch)[1]
    screens = max((each.images for each in run.samples), default=0)
    tokens = max((each.start for each in run.samples), default=0)
    return (
        f"{prompts.width}x{prompts.height}, up to {screens} in a prompt, of up to {tokens:,} tokens"
    )


# --- the trial ------------------------------------------------------------------------------

SIZES = ((448, 224), (500, 300), (224, 448))
"""Width and height of the screens, pixels; the odd one is resized for every model."""

HISTORY = History(images=3, turns=4)

_WORDS = ("open", "the", "red", "file", "menu", "save", "search", "page", "blue", "button", "click")


@dataclass(frozen=True)
class RunPrompts:
    """Prompts as large as those of a run."""

    width: int  # pixels of a screen
    height: int
    history: History

    @classmethod
    def of(cls, config: Config) -> RunPrompts:
        """Return those of a configuration. Raises ConfigError for a size that no screen has."""
        width, height = run_screen(config)
        return cls(width, height, history_of(config.policy))

    @property
    def steps(self) -> int:
        """Steps until a prompt is full, and the one after it, which has dropped a screen."""
        kept = min(self.history.images, self.history.turns + 1)
        shown = self.history.images_most or kept
        return min(shown + 1, MOST_SCREENS)


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
    run: RunPrompts | None = None  # one more trajectory, of these


async def play_trial(
    policy: LoadedPolicy, engine: Engine, responder: Responder, trial: Trial
) -> Batch:
    """All trajectories at once. Raises EngineError, and TimeoutError past the deadline.

    `policy` renders the prompts of text; its weights are not used. One that points has no such prompts.
    """
    images: dict[str, bytes] = {}
    texts = trial.texts if policy.pointing == "text" else 0  # there is no screen to point at
    played = [
        _trajectory(
            responder,
            trial,
            f"trial-{number}",
            trial.sizes[number % len(trial.sizes)],
            HISTORY,
            trial.steps,
            images,
        )
        for number in range(trial.trajectories)
    ]
    if (run := trial.run) is not None:
        size = run.width, run.height
        played.append(
            _trajectory(responder, trial, _OWN_NAME, size, run.history, run.steps, images)
        )
    async with asyncio.timeout(trial.deadline_s):
        parts = await asyncio.gather(
            *played, *(_text(policy, engine, trial, number) for number in range(texts))
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
    responder: Responder,
    trial: Trial,
    name: str,
    size: tuple[int, int],
    history: History,
    count: int,
    images: dict[str, bytes],
) -> list[BatchStep]:
    """Play `count` steps on screens of `size`, and add these to `images`."""
    rng = random.Random(f"{trial.seed} {name}")  # noqa: S311 - no secret
    width, height = size
    instruction = _instruction(rng)
    turns: list[Turn] = []
    steps: list[BatchStep] = []
    for step in range(count):
        screen = draw(rng, width, height)
        visible = history.visible(turns)
        said = await responder.answer(
            ActRequest(
                trajectory_id=name,
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
        steps.append(_step(name, step, said, shown, rng))
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
    """Return a PNG of boxes on a plain background, different each time."""
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
