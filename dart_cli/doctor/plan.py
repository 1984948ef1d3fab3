"""What a configuration will take before anything starts: memory, disk, seconds, and who waits.

Plan        all of it, for a trainer rank, an engine and the host
make_plan   from the configuration, the model's config.json and preprocessor, and a kind of GPU
held_form   the episode that prompts, chains and seconds are reckoned with

Pure: nothing is measured here but what the caller gives. The formulas are in trainer_memory.py,
host_room.py, episode_tokens.py and speeds.py; docs/hardware.md has tables of them, and what they do not
know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bus.errors import ActionError, ConfigError
from dart_cli.config.adapters import adapter_count
from dart_cli.config.architecture import expected_tensors
from dart_cli.config.model_files import Screens
from dart_cli.config.schema import MODEL_ENGINES, Config
from dart_cli.config.screens import SCREEN, screen_of
from dart_cli.doctor.episode_tokens import EpisodeForm, EpisodeTokens, episode_tokens
from dart_cli.doctor.host_room import HostPlan, host_plan
from dart_cli.doctor.shape import Shape, shape_of
from dart_cli.doctor.speeds import (
    GpuKind,
    Work,
    iteration_seconds,
    rollout_seconds,
    update_seconds,
    work_of,
)
from dart_cli.doctor.trainer_memory import (
    WIDTH,
    TrainerMemory,
    TrainerSetup,
    trained_parameters,
    trainer_memory,
)
from dart_cli.policy.coordinates import smart_resize

MIB = 2**20

HEADER = 600
"""Tokens of system prompt, template and instruction: an assumption."""
PAST_TURN = 100
"""Tokens of a completion, as most are shorter than the longest: an assumption."""
STEPS = 30
"""Steps of an episode where the tasks cannot be listed: DART's."""
ENGINE_PASSING = 4_000_000_000
"""Bytes of vLLM's activations and CUDA graphs: an assumption."""
STEP_S = 1.0
"""Seconds of an action and its screenshot, beside `env.options.pause_s`: an assumption."""
DAY_S = 86_400
BALANCED = 0.05
"""Share of the time that a side may be idle before it is said."""


@dataclass(frozen=True)
class EnginePlan:
    """One engine; bytes of each of its GPUs."""

    weights: int
    cache: int  # for keys and values
    passing: int
    prompts: float  # longest ones whose keys and values fit

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.passing


@dataclass(frozen=True)
class Seconds:
    """Of one update and of the rollouts that a batch needs."""

    update: float
    engines: float  # that the engines compute
    environments: float  # that the environments take, their answers included
    uses: int = 1  # updates on each batch, those on which it is trained again included

    @property
    def training(self) -> float:
        """Of all updates on a batch."""
        return self.update * self.uses

    @property
    def rollouts(self) -> float:
        """Until the slower of both is done."""
        return max(self.engines, self.environments)

    @property
    def waits(self) -> str:
        """The side that is idle, and for which share of the time."""
        longer, shorter = max(self.training, self.rollouts), min(self.training, self.rollouts)
        idle = 1 - shorter / longer
        if idle < BALANCED:
            return "both sides are busy"
        if self.training > self.rollouts:
            return f"the rollout GPUs will wait {idle:.0%} of the time"
        for_what = " for the environments" if self.environments > self.engines else ""
        return f"the trainer will wait {idle:.0%} of the time{for_what}"


@dataclass(frozen=True)
class Plan:
    """What a run will take."""

    shape: Shape
    setup: TrainerSetup
    form: EpisodeForm
    episode: EpisodeTokens
    screen: tuple[int, int]  # pixels
    longest: int  # tokens of the longest sequence, its completion included
    past: int  # turns before it, in its prompt
    gpu: GpuKind
    trainer: TrainerMemory | None  # None where it trains no model
    engine: EnginePlan | None  # None where it samples without one
    host: HostPlan
    seconds: Seconds | None
    work: Work
    positions: int  # tokens that the engine takes of one sequence; 0 for any number
    episodes: int  # of one update

    @property
    def screens_a_day(self) -> int:
        """Bytes of the screenshots that are stored in a day; 0 where the seconds are unknown."""
        if self.seconds is None:
            return 0
        batches = DAY_S / max(self.seconds.training, self.seconds.rollouts)
        return int(batches * self.episodes * self.form.steps * self.host.screen_bytes)


def make_plan(
    config: Config,
    tree: Mapping[str, Any],
    cut: Screens,
    gpu: GpuKind,
    *,
    steps: float = STEPS,
    most_steps: int = STEPS,
    screen: tuple[int, int] | None = None,
) -> Plan:
    """The plan of a configuration whose model has this config.json and preprocessor.

    `steps` are those of an average episode, `most_steps` of the longest; `screen` are the pixels of a
    screen where the suite's options name none. Raises ModelError where a size of the model is none,
    ConfigError where that of a screen is.
    """
    shape = shape_of(tree)
    screen = screen_of(config) or screen or SCREEN
    try:
        height, width = smart_resize(screen[1], screen[0], **cut._asdict())
    except ActionError as fault:
        raise ConfigError(f"env.options.size cannot be used: {fault}") from None
    form = held_form(config, max(1, width * height // cut.factor**2), round(steps))
    episode = episode_tokens(form)
    longest_form = replace(form, steps=max(1, most_steps))
    longest = longest_form.longest + config.rollout.max_tokens
    setup = trainer_setup(config, tree, form, episode, longest)
    trainer = trainer_memory(shape, setup) if config.train.learner == "torch" else None
    engine = None
    if config.rollout.engine in MODEL_ENGINES:
        engine = _engine(config, shape, gpu, longest)
    work = _work(config, shape, setup, form, episode)
    seconds = None
    if trainer and engine:
        seconds = _seconds(config, shape, setup, form, work, gpu, engine)
    return Plan(
        shape=shape,
        setup=setup,
        form=form,
        episode=episode,
        screen=screen,
        longest=longest,
        past=longest_form.longest_turns,
        gpu=gpu,
        trainer=trainer,
        engine=engine,
        host=host_plan(config, shape, setup, form, screen),
        seconds=seconds,
        work=work,
        positions=_positions(config, tree),
        episodes=config.data.group_size * config.data.groups_per_batch,
    )


def _positions(config: Config, tree: Mapping[str, Any]) -> int:
    """Tokens of prompt and completion that the engine takes."""
    text = tree.get("text_config")
    found = (text if isinstance(text, dict) else tree).get("max_position_embeddings")
    most = found if isinstance(found, int) and found > 0 else 0
    asked = config.vllm.max_model_len if config.rollout.engine == "vllm" else 0
    return min(asked, most) if asked and most else asked or most


def held_form(config: Config, screen: int, steps: int = STEPS) -> EpisodeForm:
    """Prompts of the configured history, of screens of `screen` tokens."""
    policy = config.policy
    return EpisodeForm(
        steps=max(1, steps),
        screen=screen,
        completion=min(config.rollout.max_tokens, PAST_TURN),
        header=HEADER,
        images=policy.history_images,
        most=policy.history_images_most if policy.history == "evict" else 0,
        turns=policy.history_turns,
    )


def trainer_setup(
    config: Config,
    tree: Mapping[str, Any],
    form: EpisodeForm,
    episode: EpisodeTokens,
    longest: int,
) -> TrainerSetup:
    """The trainer of a configuration, at its largest pack."""
    train, lora = config.train, config.model.lora
    tokens = max(train.pack_tokens, longest)
    share = form.steps * form.completion / max(1, episode.tokens)
    predicted = max(config.rollout.max_tokens, round(tokens * share))
    return TrainerSetup(
        tokens=tokens,
        predicted=predicted,
        dtype=config.model.dtype,
        ranks=train.ranks,
        recompute=train.recompute == "layer",
        offload=train.offload == "optimizer",
        freeze_vision=config.model.freeze_vision,
        reference=train.kl_beta > 0,
        adapters=adapter_count(expected_tensors(tree), lora) if lora else 0,
        points=config.policy.pointing == "pointer",
    )


def _engine(config: Config, shape: Shape, gpu: GpuKind, longest: int) -> EnginePlan:
    wide = WIDTH[config.model.dtype]
    token = shape.cached * wide
    if config.rollout.engine != "vllm":
        cache = config.rollout.kv_cache_mb * MIB
        kept = config.rollout.prefix_cache_mb * MIB
        passing = longest * wide * (4 * shape.width + 2 * shape.mlp)
        prompts = cache / (longest * token)
        return EnginePlan(wide * shape.parameters, cache + kept, passing, prompts)
    share = config.vllm.tensor_parallel
    weights = wide * shape.parameters // share
    cache = config.vllm.kv_cache_mb * MIB
    if not cache:
        room = int(config.vllm.gpu_memory_utilization * gpu.memory)
        cache = max(0, room - weights - ENGINE_PASSING)
    return EnginePlan(weights, cache, ENGINE_PASSING, cache * share / (longest * token))


def _work(
    config: Config, shape: Shape, setup: TrainerSetup, form: EpisodeForm, episode: EpisodeTokens
) -> Work:
    # A frozen weight needs no gradient of its own: one pass less.
    passes = 2.0 if setup.adapters else 3.0
    return work_of(
        shape,
        episode,
        episodes=config.data.group_size * config.data.groups_per_batch,
        steps=form.steps,
        completion=form.completion,
        screen=form.screen,
        share=config.data.high_entropy,
        passes=passes + setup.recompute + setup.reference,
        caches=config.rollout.engine != "vllm" or config.vllm.prefix_caching,
    )


def _seconds(
    config: Config,
    shape: Shape,
    setup: TrainerSetup,
    form: EpisodeForm,
    work: Work,
    gpu: GpuKind,
    engine: EnginePlan,
) -> Seconds:
    share = config.vllm.tensor_parallel if config.rollout.engine == "vllm" else 1
    engines, slots = max(1, config.up.rollouts), max(1, config.up.envs) * config.env.slots
    together = max(1, min(config.rollout.max_batch, slots // engines, int(engine.prompts)))
    moved = trained_parameters(shape, setup) if setup.offload else 0
    episodes = config.data.group_size * config.data.groups_per_batch
    each = iteration_seconds(shape, gpu, together=together, context=work.context, share=share)
    pause = config.env.options.get("pause_s", 0.0)
    waited = (float(pause) if isinstance(pause, int | float) else 0.0) + STEP_S
    return Seconds(
        update=update_seconds(work, gpu, setup.ranks, offloaded=moved),
        engines=rollout_seconds(work, shape, gpu, engines=engines, share=share, together=together),
        environments=episodes * form.steps * (waited + form.completion * each) / slots,
        uses=1 + config.train.reuse,
    )
