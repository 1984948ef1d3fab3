"""What a configuration will take before anything starts: memory of GPUs and host, disk.

Plan            all of it, for a trainer rank, an engine and the host
make_plan       from the configuration, the model's config.json and preprocessor, and a kind of GPU
EpisodeTokens   its chains, and what an engine with a prefix cache reads anew
episode_tokens  the one from the other

Pure: nothing is measured here but what the caller gives. The formulas are in trainer_memory.py and
host_room.py; docs/hardware.md has tables of them, and what they do not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bus.errors import ActionError, ConfigError
from dart_cli.config.architecture import Shape, shape_of
from dart_cli.config.model_folder import Screens
from dart_cli.config.schema import MODEL_ENGINES, Config
from dart_cli.config.schema.rollout import KV_CACHE_MB, PREFIX_CACHE_MB
from dart_cli.config.screens import SCREEN, screen_of, screens_in_play
from dart_cli.doctor.host_memory import EpisodeForm, HostPlan, host_plan
from dart_cli.doctor.trainer_memory import (
    WIDTH,
    TrainerMemory,
    TrainerSetup,
    trainer_memory,
)
from dart_cli.engines.vllm.room import divide, divide_on_cpu
from dart_cli.language.coordinates import screen_tokens

MIB = 2**20

HEADER = 600
"""Tokens of system prompt, template and instruction: an assumption."""
PAST_TURN = 100
"""Tokens of a completion, as most are shorter than the longest: an assumption."""
STEPS = 30
"""Steps of an episode where the tasks cannot be listed: DART's."""


@dataclass(frozen=True)
class GpuKind:
    """One GPU: its name and bytes."""

    name: str
    memory: int


H100 = GpuKind("H100 80 GB", 85_520_000_000)
"""Assumed where no GPU is."""


@dataclass(frozen=True)
class EnginePlan:
    """One engine; bytes of each of its GPUs."""

    weights: int
    cache: int  # for keys and values
    passing: int
    prompts: float  # longest ones whose keys and values fit
    features: int = 0  # of screens that are shown again
    screens: int = 0  # whose features these are

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.passing + self.features


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
    positions: int  # tokens that the engine takes of one sequence; 0 for any number


def make_plan(
    config: Config,
    tree: Mapping[str, Any],
    cut: Screens,
    gpu: GpuKind,
    *,
    steps: float = STEPS,
    most_steps: int = STEPS,
    screen: tuple[int, int] | None = None,
    on_cpu: bool = False,
) -> Plan:
    """Return the plan of a configuration whose model has this config.json and preprocessor.

    `steps` are those of an average episode, `most_steps` of the longest; `screen` are the pixels of a
    screen where the suite's options name none. `on_cpu`: no process has a GPU, and `gpu` plays no part. Raises
    ModelError where a size of the model is none, ConfigError where that of a screen is.
    """
    shape = shape_of(tree)
    screen = screen_of(config) or screen or SCREEN
    try:
        tokens = screen_tokens(screen, cut)
    except ActionError as fault:
        raise ConfigError(f"env.options.size cannot be used: {fault}") from None
    form = episode_form(config, tokens, round(steps))
    episode = episode_tokens(form)
    longest_form = replace(form, steps=max(1, most_steps))
    longest = longest_form.longest + config.rollout.max_tokens
    setup = trainer_setup(config, tree, form, episode, longest)
    trainer = trainer_memory(shape, setup) if config.train.learner == "torch" else None
    engine, positions = None, _positions(config, tree)
    if config.rollout.engine in MODEL_ENGINES:
        memory = None if on_cpu or config.rollout.device == "cpu" else gpu.memory
        engine = _engine(config, shape, memory, longest, positions or longest, form.screen)
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
        positions=positions,
    )


def _positions(config: Config, tree: Mapping[str, Any]) -> int:
    """Tokens of prompt and completion that the engine takes."""
    text = tree.get("text_config")
    found = (text if isinstance(text, dict) else tree).get("max_position_embeddings")
    most = found if isinstance(found, int) and found > 0 else 0
    asked = config.vllm.max_model_len if config.rollout.engine == "vllm" else 0
    return min(asked, most) if asked and most else asked or most


def episode_form(config: Config, screen: int, steps: int = STEPS) -> EpisodeForm:
    """Prompts of the configured history, of screens of `screen` tokens."""
    policy = config.policy
    return EpisodeForm(
        steps=max(1, steps),
        screen=screen,
        completion=min(config.rollout.max_tokens, PAST_TURN),
        header=HEADER,
        images=policy.history_images,
        most=policy.history_images_most,
        turns=policy.history_turns,
    )


def trainer_setup(
    config: Config,
    tree: Mapping[str, Any],
    form: EpisodeForm,
    episode: EpisodeTokens,
    longest: int,
) -> TrainerSetup:
    """Return the trainer of a configuration, at its largest pack."""
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
        adapters=shape_of(tree).adapters(lora.rank) if lora else 0,
        points=config.policy.pointing == "pointer",
    )


def _engine(
    config: Config, shape: Shape, memory: int | None, longest: int, length: int, screen: int
) -> EnginePlan:
    """Return the plan of an engine that takes sequences of `length` tokens and prompts of up to `longest`.

    `memory` is that of a GPU, bytes; None for an engine on the CPU.
    """
    wide = WIDTH[config.model.dtype]
    token = shape.cached * wide
    if config.rollout.engine != "vllm":
        cache = KV_CACHE_MB * MIB
        kept = PREFIX_CACHE_MB * MIB
        passing = longest * wide * (4 * shape.width + 2 * shape.mlp)
        prompts = cache / (longest * token)
        return EnginePlan(wide * shape.parameters, cache + kept, passing, prompts)
    shown = screens_in_play(config) * screen
    if memory is None:
        room = divide_on_cpu(config.vllm, shape, wide=wide, length=length, shown=shown)
    else:
        room = divide(config.vllm, shape, wide=wide, memory=memory, length=length, shown=shown)
    return EnginePlan(
        weights=room.weights,
        cache=room.cache,
        passing=room.passing,
        prompts=room.cache * config.vllm.tensor_parallel / (longest * token),
        features=room.features,
        screens=room.kept // screen,
    )


# --- episodes -------------------------------------------------------------------------------
# `slide` drops a screen at each step once there are `images`, so that each prompt differs from the one before
# behind that screen; `evict` drops several at once (docs/policy.md). A chain is steps whose prompts extend one
# another: the trainer computes its tokens once.


@dataclass(frozen=True)
class EpisodeTokens:
    """Of one episode."""

    chains: tuple[tuple[int, int], ...]  # tokens and steps of each
    alone: int  # tokens of all steps' sequences, each alone
    read: int  # prompt tokens that a prefix cache does not have
    pairs: float  # of a token that is read and one that it sees
    screens_read: int  # among these tokens

    @property
    def tokens(self) -> int:
        """Of all chains."""
        return sum(tokens for tokens, _ in self.chains)


def episode_tokens(form: EpisodeForm) -> EpisodeTokens:
    """Play the prompts of an episode through, without any text."""
    chains: list[tuple[int, int]] = []
    alone = read = screens = 0
    pairs = 0.0
    first_image = first_turn = 1  # of the prompt, counted from 1
    for step in range(1, form.steps + 1):
        shown, turn = _window(form, step, first_image, first_turn)
        length = form.header + (step - turn) * form.completion + (step - shown + 1) * form.screen
        whole = length + form.completion
        extends = step > 1 and (shown, turn) == (first_image, first_turn)
        if extends:
            cached, seen = chains[-1][0], 1
            chains[-1] = (whole, chains[-1][1] + 1)
        else:
            kept = first_image - first_turn if turn == first_turn else 0  # turns of text alone
            cached = form.header + kept * form.completion if step > 1 else 0
            seen = step - shown + 1
            chains.append((whole, 1))
        first_image, first_turn = shown, turn
        alone += whole
        read += length - cached
        pairs += (length**2 - cached**2) / 2
        screens += seen
    return EpisodeTokens(tuple(chains), alone, read, pairs, screens)


def _window(form: EpisodeForm, step: int, image: int, turn: int) -> tuple[int, int]:
    """Return the first screen and the first turn of a step's prompt, after those of the step before."""
    if not form.most:
        return max(1, step - form.images + 1), max(1, step - form.turns)
    if step - image + 1 <= form.most:
        return image, turn
    return max(1, step - form.images + 1), max(1, step - form.turns)
