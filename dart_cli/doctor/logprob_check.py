"""Compare log-probabilities of engine and trainer on a model folder, without a run: `dart doctor --parity`.

    check_logprobs       samples with the engine, scores with the trainer, yields the findings
    compare_with_limit   yields the findings for tokens that both have scored
    Trial                what is sampled: trajectories, steps, temperature
    RunPrompts           the screens and the history of a run, for one trajectory of the trial
    play_trial           samples a trial, as a batch that the trainer can score

The configured engine samples a trial with the model and is closed. Then the trainer's forward pass scores the
same tokens, with weights in the model's dtype and without optimizer state. So two copies of the model are
never in memory at once, and the check needs no more memory than the engine. A trial needs no environment: its
screens are random drawings. Prompts have past screens and completions as in a run; some are text alone,
except for a policy that points. Most screens are small. One trajectory has screens as large as the run's, and
as many as its history shows, because vLLM reads such a long prompt in several parts on a GPU, but a small one
in one part.
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
from dart_cli.engines.base import Engine, GenerateRequest, Responder
from dart_cli.engines.completions import completion
from dart_cli.engines.responder import PolicyResponder
from dart_cli.hardware.device import check_memory
from dart_cli.language.history import History, history_of
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.runtime.findings import error, error_of, ok, warning
from dart_cli.runtime.role import limit_threads
from dart_cli.train.logprob_check import (
    LEAST_TOKENS,
    ComparedTokens,
    alarm_of,
    limit_of,
    rescore,
)
from dart_cli.train.trained_policy import TrainModel
from envs.contract.blobs import content_hash

MOST_TOKENS = 64
"""Most tokens of a completion, if rollout.max_tokens is larger: enough for the comparison."""

MOST_SCREENS = 8
"""Most screens in a prompt of the run's own size: 21,500 tokens at 1920x1080."""

_NAMES = {"text": "no screen", "one": "one screen", "several": "several screens"}
_OWN, _OWN_NAME = "run's screens", "run"


def check_logprobs(config: Config) -> Iterator[Finding]:
    """Yield findings about the log-probabilities that engine and trainer give the same tokens.

    No other process is needed.
    """
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
        gc.collect()  # frees the engine's copy of the model
        sampled_s = time.monotonic() - began
        model = TrainModel.load_frozen(config)
        with check_memory("the trainer's forward pass", model.policy.device, _FEWER):
            small, large = split_batch(batch)
            compared = rescore(model, small, config.train.pack_tokens)
            run_tokens = rescore(model, large, config.train.pack_tokens)
    except DartError as fault:
        yield error_of("parity", fault, "correct what it names, then run dart doctor again")
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
        f"engine {config.rollout.engine} sampled {compared.engine.size + run_tokens.engine.size} tokens of {config.model.path} "
        f"in {config.model.dtype} at temperature {config.rollout.temperature:g}; loading and sampling took "
        f"{sampled_s:.1f} s",
    )
    yield from compare_with_limit(compared, limit_of(model), run_tokens, _run_sizes(config, batch))


async def sample(config: Config) -> Batch:
    """Sample a trial with the configured engine, and return it as a batch."""
    # Late imports: scripts/gpu-check draws screens where no bus is installed.
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


def compare_with_limit(
    compared: ComparedTokens,
    limit: float,
    run_tokens: ComparedTokens | None = None,
    run_sizes: str = "",
) -> Iterator[Finding]:
    """Yield a finding for each kind of prompt, and one error if a mean difference exceeds `limit` nats.

    `run_tokens` are from prompts as large as the run's, whose size `run_sizes` describes.
    """
    kinds = {_NAMES[kind]: gap for kind, gap in compared.by_screens().items()}
    if run_tokens is not None and run_tokens.engine.size:
        kinds[_OWN] = run_tokens.mismatch()
    for name, gap in kinds.items():
        text = (
            f"{name:<16}{gap.tokens:>5} tokens  |difference| mean {gap.mean:.2e}  half "
            f"<= {gap.p50:.2e}  99 % <= {gap.p99:.2e}  max {gap.max:.2e} nats  k3 KL {gap.kl:.2e}"
        )
        if name == _OWN and run_sizes:
            text += f"; {run_sizes}"
        is_beyond = not gap.mean <= limit
        is_few = gap.tokens < LEAST_TOKENS
        fix = "see below"
        if is_few:
            fix = f"raise rollout.max_tokens: fewer than {LEAST_TOKENS} tokens are too few for a comparison"
        yield Finding("parity", "warning" if is_beyond else "ok", text, fix if is_beyond else "")
    if alarm := alarm_of(compared, limit):
        problem, _, fix = alarm.partition(". ")
        yield error("parity", problem, fix)
    elif run_tokens is not None and (alarm := alarm_of(run_tokens, limit)):
        yield error("parity", f"on prompts of the {_OWN} alone: {alarm.partition('. ')[0]}", _LONG)
    else:
        yield ok("parity", f"they agree: every mean is within {limit:g} nats")


_LONG = (
    "Small prompts agree. vLLM reads long ones in parts of max_num_batched_tokens. If the engine is vllm, compare again with "
    "vllm.options = { enable_chunked_prefill = false, max_num_batched_tokens = N }, where N is "
    "vllm.max_model_len; if they agree then, run with these options and report it"
)
_FEWER = "lower train.pack_tokens or the history of [policy]; `dart doctor CONFIG` shows what a run takes"


def split_batch(batch: Batch) -> tuple[Batch, Batch]:
    """Return a batch of the small prompts, and one of the prompts as large as the run's."""
    small = [sample for sample in batch.samples if sample.trajectory_id != _OWN_NAME]
    large = [sample for sample in batch.samples if sample.trajectory_id == _OWN_NAME]
    return batch.model_copy(update={"samples": small}), batch.model_copy(update={"samples": large})


def _run_sizes(config: Config, batch: Batch) -> str:
    """Return in words how large the prompts of the run's own size are."""
    prompts, run = RunPrompts.of(config), split_batch(batch)[1]
    screens = max((sample.images for sample in run.samples), default=0)
    tokens = max((sample.start for sample in run.samples), default=0)
    return (
        f"{prompts.width}x{prompts.height}, up to {screens} in a prompt, of up to {tokens:,} tokens"
    )


# --- the trial ------------------------------------------------------------------------------

SIZES = ((448, 224), (500, 300), (224, 448))
"""Width and height of the small screens in pixels. 500x300 has to be resized for every model."""

HISTORY = History(images=3, turns=4)

_WORDS = ("open", "the", "red", "file", "menu", "save", "search", "page", "blue", "button", "click")


@dataclass(frozen=True)
class RunPrompts:
    """The sizes of a run's prompts, with which one trajectory of the trial is sampled."""

    width: int  # pixels of a screen
    height: int
    history: History

    @classmethod
    def of(cls, config: Config) -> RunPrompts:
        """Return the sizes of a configuration's prompts. Raises ConfigError for an invalid screen size."""
        width, height = run_screen(config)
        return cls(width, height, history_of(config.policy))

    @property
    def steps(self) -> int:
        """The number of steps until a prompt is full, and one more, whose prompt has dropped a screen."""
        visible = min(self.history.images, self.history.turns + 1)
        screens = self.history.images_most or visible
        return min(screens + 1, MOST_SCREENS)


@dataclass(frozen=True)
class Trial:
    """What a trial samples: how many trajectories and steps, with which screens and at which temperature."""

    temperature: float
    max_tokens: int
    trajectories: int = 6
    steps: int = 3  # of each trajectory; the third step shows three screens
    texts: int = 6  # prompts without a screen
    sizes: Sequence[tuple[int, int]] = SIZES
    seed: int = 0
    deadline_s: float = 600.0  # for the whole trial
    run: RunPrompts | None = None  # one more trajectory with prompts as large as the run's


async def play_trial(
    policy: LoadedPolicy, engine: Engine, responder: Responder, trial: Trial
) -> Batch:
    """Sample all trajectories at the same time, and return them as a batch.

    `policy` renders the prompts of text alone, which a policy that points does not have; its weights are not
    used. Raises EngineError, and TimeoutError after the deadline.
    """
    images: dict[str, bytes] = {}
    texts = trial.texts if policy.pointing == "text" else 0  # there is no screen to point at
    trajectories = [
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
        trajectories.append(
            _trajectory(responder, trial, _OWN_NAME, size, run.history, run.steps, images)
        )
    async with asyncio.timeout(trial.deadline_s):
        parts = await asyncio.gather(
            *trajectories, *(_text(policy, engine, trial, number) for number in range(texts))
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
    """Sample `count` steps with screens of `size`, add the screens to `images`, and return the steps."""
    rng = random.Random(f"{trial.seed} {name}")  # noqa: S311 - no secret
    width, height = size
    instruction = _instruction(rng)
    turns: list[Turn] = []
    steps: list[BatchStep] = []
    for step in range(count):
        screen = draw(rng, width, height)
        visible = history.visible(turns)
        reply = await responder.answer(
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
        screens = [turn.screenshot for turn in visible if turn.screenshot is not None] + [screen]
        images.update({content_hash(blob): blob for blob in screens})
        steps.append(_step(name, step, reply, screens, rng))
        turns.append(Turn(text=reply.text, screenshot=screen, token_ids=reply.sampled.token_ids))
    return steps


async def _text(policy: LoadedPolicy, engine: Engine, trial: Trial, number: int) -> list[BatchStep]:
    """Sample one completion of a prompt without a screen, which never occurs in a run."""
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
    trajectory: str, step: int, reply: Completion, screens: Sequence[bytes], rng: random.Random
) -> BatchStep:
    """Return a step of the trial with a random advantage."""
    return BatchStep(
        group_id=trajectory,
        trajectory_id=trajectory,
        step=step,
        prompt_token_ids=int32s(reply.prompt_token_ids),
        token_ids=int32s(reply.sampled.token_ids),
        image_hashes=[content_hash(blob) for blob in screens],
        behaviour_logprobs=float64s(reply.sampled.behaviour_logprobs),
        version_spans=reply.sampled.version_spans,
        advantage=rng.uniform(-1.5, 1.5),
        weight=1.0,
        patches=reply.sampled.patches,
        routing=reply.sampled.routing,
    )


def _sampling(trial: Trial, rng: random.Random) -> Sampling:
    return Sampling(
        temperature=trial.temperature, max_tokens=trial.max_tokens, seed=rng.getrandbits(32)
    )


def _instruction(rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randint(4, 9)))


def draw(rng: random.Random, width: int, height: int) -> bytes:
    """Return a PNG with random boxes on a plain background."""
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
