"""Plan what a run will take before it starts: memory of GPUs and host, disk.

Plan            what a trainer rank, an engine and the host need
make_plan       makes the plan from a configuration, the model's config.json and preprocessor, a kind of GPU
EpisodeTokens   the chains of an episode, and the tokens that an engine with a prefix cache must read
episode_tokens  counts them from the sizes of an episode
passes          how many forward passes of the policy an update takes as long as

All functions are pure. The formulas are in trainer_memory.py and host_memory.py; docs/hardware.md has tables
of them and lists what they do not include.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bus.errors import ActionError, ConfigError, ModelError
from dart_cli.config.architecture import Shape, shape_of
from dart_cli.config.model_folder import Screens
from dart_cli.config.published import small_files
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
from dart_cli.engines.vllm.room import STATES, divide, divide_on_cpu
from dart_cli.language.coordinates import screen_tokens

MIB = 2**20

HEADER = 600
"""Tokens of system prompt, template and instruction (assumed)."""
PAST_TURN = 100
"""Tokens of a typical completion, which is shorter than the longest (assumed)."""
STEPS = 30
"""Steps of an episode if the tasks cannot be listed: the number in the DART paper."""


@dataclass(frozen=True)
class GpuKind:
    """A kind of GPU: its name and its memory in bytes."""

    name: str
    memory: int


H100 = GpuKind("H100 80 GB", 85_520_000_000)
"""The GPU that is assumed on a host without one."""


@dataclass(frozen=True)
class EnginePlan:
    """What one engine needs, in bytes of each of its GPUs."""

    weights: int
    cache: int  # keys and values, and states of recurrent layers
    passing: int  # activations and graphs
    prompts: float  # how many longest prompts fit into the cache
    features: int = 0  # of screens that later prompts show again
    screens: int = 0  # number of screens whose features are kept

    @property
    def total(self) -> int:
        """The bytes of all parts."""
        return self.weights + self.cache + self.passing + self.features


@dataclass(frozen=True)
class Plan:
    """What a run will take, and the sizes from which this follows."""

    shape: Shape
    setup: TrainerSetup
    form: EpisodeForm
    episode: EpisodeTokens
    screen: tuple[int, int]  # pixels
    longest: int  # tokens of the longest sequence, its completion included
    past: int  # past turns in the longest prompt
    gpu: GpuKind
    trainer: TrainerMemory | None  # None if the run trains no model
    engine: EnginePlan | None  # None if it samples without a model
    host: HostPlan
    positions: int  # most tokens of a sequence that the engine accepts; 0 for no limit
    teacher_positions: int = 0  # most tokens that the teacher has positions for; 0 for no limit
    teacher_published: str = ""  # checkpoint whose shape stands for the teacher's absent folder


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

    `steps` is the length of an average episode, `most_steps` of the longest. `screen` is the size of a screen
    in pixels if the suite's options name none. `on_cpu` says that no process has a GPU; `gpu` is then
    ignored. Raises ModelError for an invalid size of the model, ConfigError for an invalid size of a screen.
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
        teacher_positions=_model_positions(_teacher_files(config)[0]),
        teacher_published=_teacher_files(config)[1],
    )


def _positions(config: Config, tree: Mapping[str, Any]) -> int:
    """Return the most tokens of prompt and completion that the engine accepts; 0 for no limit."""
    most = _model_positions(tree)
    configured_limit = config.vllm.max_model_len if config.rollout.engine == "vllm" else 0
    return min(configured_limit, most) if configured_limit and most else configured_limit or most


def _model_positions(tree: Mapping[str, Any]) -> int:
    """Return the number of positions in a config.json; 0 where it has none."""
    text = tree.get("text_config")
    positions = (text if isinstance(text, dict) else tree).get("max_position_embeddings")
    return positions if isinstance(positions, int) and positions > 0 else 0


def episode_form(config: Config, screen: int, steps: int = STEPS) -> EpisodeForm:
    """Return the sizes of an episode with the configured history and `screen` tokens for each screen."""
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
    """Return the trainer's setup with its largest pack; `longest` is the tokens of the longest sequence."""
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
        reference=train.kl_beta > 0 or (train.teacher_weight > 0 and not config.teacher.model),
        teacher=_teacher(config),
        is_taught=config.train.teacher_weight > 0,
        adapters=shape_of(tree).adapters(lora.rank) if lora else 0,
        points=config.policy.pointing == "pointer",
    )


def _teacher(config: Config) -> Shape | None:
    """Return the shape of a teacher of its own weights that scores; None without one. Raises ModelError."""
    tree, _ = _teacher_files(config)
    return shape_of(tree) if tree else None


def _teacher_files(config: Config) -> tuple[dict[str, Any], str]:
    """Return (config.json, name of a published checkpoint) of the teacher that scores; both empty without one.

    Raises ModelError.
    """
    if not (config.train.teacher_weight and config.teacher.model):
        return {}, ""
    model = config.model.model_copy(update={"path": config.teacher.model})
    try:
        tree, _, published = small_files(config.model_copy(update={"model": model}))
    except ModelError as error:
        raise ModelError(str(error).replace("model.path", "teacher.model")) from None
    return tree, published


def passes(shape: Shape, setup: TrainerSetup) -> float:
    """Return how many forward passes of the policy the arithmetic of an update equals, for each token."""
    # A frozen weight needs no gradient: one pass less.
    own = (2.0 if setup.adapters else 3.0) + setup.recompute + setup.reference
    teacher = setup.teacher
    return own + (teacher.token_operations / shape.token_operations if teacher else 0.0)


def _engine(
    config: Config, shape: Shape, memory: int | None, longest: int, length: int, screen: int
) -> EnginePlan:
    """Return the plan of an engine for sequences of up to `length` tokens and prompts of up to `longest`.

    `memory` is the bytes of a GPU, None for an engine on the CPU. `screen` is the tokens of a screen.
    """
    wide = WIDTH[config.model.dtype]
    tokens, states = longest * shape.cached * wide, shape.state_bytes(wide)
    if config.rollout.engine != "vllm":
        cache = KV_CACHE_MB * MIB
        prefix_cache = PREFIX_CACHE_MB * MIB
        passing = longest * wide * (4 * shape.width + 2 * shape.mlp + shape.routed)
        prompts = cache / (tokens + states)
        return EnginePlan(wide * shape.parameters, cache + prefix_cache, passing, prompts)
    image_tokens = screens_in_play(config) * screen
    if memory is None:
        room = divide_on_cpu(
            config.vllm, shape, wide=wide, length=length, screen_tokens=image_tokens
        )
    else:
        room = divide(
            config.vllm, shape, wide=wide, memory=memory, length=length, screen_tokens=image_tokens
        )
    return EnginePlan(
        weights=room.weights,
        cache=room.cache,
        passing=room.passing,
        prompts=room.cache * config.vllm.tensor_parallel / (tokens + STATES * states),
        features=room.features,
        screens=room.feature_tokens // screen,
    )


# --- episodes -------------------------------------------------------------------------------
# A sliding history drops a screen at each step once there are `images`, so that each prompt differs from
# the one before it from that screen on. A history that evicts drops several at once (docs/policy.md). A
# chain is a series of steps whose prompts extend one another: the trainer computes its tokens once.


@dataclass(frozen=True)
class EpisodeTokens:
    """Tokens of one episode."""

    chains: tuple[tuple[int, int], ...]  # (tokens, steps) of each
    alone: int  # tokens of all steps, if each sequence is computed alone
    read: int  # prompt tokens that are not in the prefix cache
    pairs: float  # pairs of a token that is read and a token that it attends to
    screens_read: int  # screens among the tokens that are read

    @property
    def tokens(self) -> int:
        """The tokens of all chains."""
        return sum(tokens for tokens, _ in self.chains)


def episode_tokens(form: EpisodeForm) -> EpisodeTokens:
    """Count the tokens of an episode by going through the prompts of its steps."""
    chains: list[tuple[int, int]] = []
    alone = read = screens = 0
    pairs = 0.0
    first_image = first_turn = 1  # of the prompt; steps count from 1
    for step in range(1, form.steps + 1):
        image, turn = _window(form, step, first_image, first_turn)
        length = form.header + (step - turn) * form.completion + (step - image + 1) * form.screen
        whole = length + form.completion
        extends = step > 1 and (image, turn) == (first_image, first_turn)
        if extends:
            cached, screens_read_now = chains[-1][0], 1
            chains[-1] = (whole, chains[-1][1] + 1)
        else:
            # Turns before the first screen are only text.
            text_turns = first_image - first_turn if turn == first_turn else 0
            cached = form.header + text_turns * form.completion if step > 1 else 0
            screens_read_now = step - image + 1
            chains.append((whole, 1))
        first_image, first_turn = image, turn
        alone += whole
        read += length - cached
        pairs += (length**2 - cached**2) / 2
        screens += screens_read_now
    return EpisodeTokens(tuple(chains), alone, read, pairs, screens)


def _window(form: EpisodeForm, step: int, image: int, turn: int) -> tuple[int, int]:
    """Return the first screen and the first turn in a step's prompt.

    `image` and `turn` are the first ones in the prompt of the step before.
    """
    if not form.most:
        return max(1, step - form.images + 1), max(1, step - form.turns)
    if step - image + 1 <= form.most:
        return image, turn
    return max(1, step - form.images + 1), max(1, step - form.turns)
