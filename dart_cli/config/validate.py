"""What no single field of a configuration can show: combinations, places, tasks, model, devices.

    check_config   raises the first mistake as one line with key, value, file and cure
    find_mistakes  all of them, the cheapest to find first

One place for all of it, without torch and fast, so that every verb refuses before it starts anything.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bus.errors import ConfigError, MissingPartError, TaskError
from dart_cli.config import places
from dart_cli.config.adapters import lora_mistakes
from dart_cli.config.devices import device_mistakes, gpu_mistakes
from dart_cli.config.engines import engine_mistakes
from dart_cli.config.judge_rules import judge_problems, unjudged_problem
from dart_cli.config.load import Source, shown
from dart_cli.config.models import BUILTIN, model_problem, resize_problem
from dart_cli.config.places import Mistake
from dart_cli.config.policy_rules import (
    needs_model,
    pointer_mistakes,
    policy_mistakes,
    verifier_mistakes,
)
from dart_cli.config.schema import (
    BY_TRACKER,
    MODEL_ENGINES,
    TRAIN_SEEDS,
    Config,
    DataConfig,
    TrainConfig,
    observed_kinds,
)
from dart_cli.config.task_split import composed_tasks, trained_tasks, training_tasks
from envs.registry import (
    SHIPPED,
    check_observe,
    check_options,
    check_parts,
    find_task,
    load_suite,
    make_env,
)
from envs.selection import is_pattern, select_tasks

if TYPE_CHECKING:
    from bus.messages import Role  # a type alone: the messages take as long as all of this

logger = logging.getLogger(__name__)

LEAST_MEMORY_MB = 32
"""Private memory below which no environment's process starts."""


def check_config(config: Config, source: Source | None = None, role: Role | None = None) -> None:
    """Raise ConfigError for the first mistake, for one role or (None) for all.

    An environment or data host needs no model folder, a rollout or train host no environments.
    """
    for key, text in find_mistakes(config, role):
        raise ConfigError(f"{key} {text} {source.cite(key)}" if source else f"{key} {text}")


def find_mistakes(config: Config, role: Role | None = None) -> Iterator[Mistake]:
    """Every mistake that single fields cannot show, the cheapest to find first."""
    if closed := list(places.closed(config, role)):  # nothing below could read there, either
        yield from closed
        return
    yield from policy_mistakes(config)
    yield from _sizes(config)
    yield from _numbers(config)
    yield from gpu_mistakes(config)
    yield from places.places(config)
    yield from places.bus(config)
    yield from places.weights(config)
    yield from _lists(config)
    if role in (None, "data"):
        yield from places.pool(config)
    if role in (None, "env", "eval") and (judge := config.env.judge) is not None:
        yield from (Mistake(f"env.judge.{key}", text) for key, text in judge_problems(judge))
    if role in (None, "env", "serve", "data", "eval"):
        yield from _tasks(config, role)
    if role in (None, "rollout", "train", "eval"):
        yield from _model(config, role)
        yield from device_mistakes(config, role)
    if role in (None, "rollout", "eval"):
        yield from engine_mistakes(config)


def _sizes(config: Config) -> Iterator[Mistake]:
    policy, memory_mb = config.policy, config.env.memory_mb
    if policy.resize_min_pixels > policy.resize_max_pixels:
        yield Mistake(
            "policy.resize_min_pixels",
            f"must be <= policy.resize_max_pixels ({policy.resize_max_pixels}), got "
            f"{policy.resize_min_pixels}",
        )
    if 0 < memory_mb < LEAST_MEMORY_MB:
        yield Mistake(
            "env.memory_mb",
            f"must be 0 or >= {LEAST_MEMORY_MB}, Python alone takes that much, got {memory_mb}",
        )


def _numbers(config: Config) -> Iterator[Mistake]:
    data, train, evaluation = config.data, config.train, config.eval
    first, end = config.env.seeds
    if not 0 <= first < end <= TRAIN_SEEDS:
        yield Mistake(
            "env.seeds",
            f"must be [first, end] with 0 <= first < end <= {TRAIN_SEEDS}, from where seeds "
            f"are for evaluation, got [{first}, {end}]",
        )
    if 0 < data.max_open_groups < data.groups_per_batch:
        yield Mistake(
            "data.max_open_groups",
            f"must be >= data.groups_per_batch ({data.groups_per_batch}) or no batch ever fills, "
            f"got {data.max_open_groups}",
        )
    if data.scheduling == "april" and not data.coupled:
        yield Mistake(
            "data.scheduling",
            '= "april" stops when a batch is full and needs data.coupled = true; '
            'without a stop "rollout" wastes nothing',
        )
    yield from _curation(data)
    yield from _matched_screens(config)
    yield from _schedule(train)
    yield from _average(train)
    yield from _objective(train)
    if evaluation.seed < TRAIN_SEEDS:
        yield Mistake(
            "eval.seed",
            f"must be >= {TRAIN_SEEDS}, below are the training seeds, got {evaluation.seed}",
        )
    if evaluation.around and evaluation.episodes == 0:
        yield Mistake(
            "eval.episodes", "must be >= 1 with eval.around = true, got 0; or set it to false"
        )


def _curation(data: DataConfig) -> Iterator[Mistake]:
    """Settings under which a part of the curation can never act."""
    yield from _single_stream(data)
    least = 1 / (data.group_size + 1)
    if 0 < data.pool_ratio < least:
        yield Mistake(
            "data.pool_ratio",
            f"must be 0 or >= {least:.4g}, one success beside data.group_size = "
            f"{data.group_size} failures, got {data.pool_ratio:g}",
        )
    if data.pool and not data.pool_ratio:
        yield Mistake(
            "data.pool_ratio", "must be > 0, e.g. 0.125, or data.pool is never drawn from"
        )
    if data.screen_credit != "off" and data.group_size < 2:
        yield Mistake(
            "data.screen_credit",
            f'= "{data.screen_credit}" compares the trajectories of a group and needs '
            f'data.group_size >= 2, got {data.group_size}; or set it to "off"',
        )
    if data.fork_weight and data.group_size < 2:
        yield Mistake(
            "data.fork_weight",
            "compares the trajectories of a group and needs data.group_size >= 2, got "
            f"{data.group_size}; or set it to 0",
        )
    if data.dynamic_number and data.min_group_size > data.group_size:
        yield Mistake(
            "data.min_group_size",
            f"must be <= data.group_size ({data.group_size}), got {data.min_group_size}",
        )


def _schedule(train: TrainConfig) -> Iterator[Mistake]:
    """Learning rates that cannot be reached, and settings of a fall where nothing falls."""
    if train.warmup > train.updates > 0:
        yield Mistake(
            "train.warmup",
            f"must be <= train.updates ({train.updates}) or the learning rate never reaches "
            f"train.lr, got {train.warmup}",
        )
    if train.lr_end == 1 and train.lr_hold:
        yield Mistake(
            "train.lr_hold",
            f"= {train.lr_hold:g} delays a fall, and train.lr_end = 1 has none; set that below 1, "
            "e.g. 0.2, or this to 0",
        )
    if train.lr_end == 1 and train.lr_follows != "run":
        yield Mistake(
            "train.lr_follows",
            f'= "{train.lr_follows}" is what a fall follows, and train.lr_end = 1 has none; set '
            'that below 1, e.g. 0.2, or this to "run"',
        )


def _single_stream(data: DataConfig) -> Iterator[Mistake]:
    """Groups of one and trackers need each other; what is for larger groups has no meaning there."""
    by_tracker = data.advantage in BY_TRACKER
    if data.group_size == 1 and not by_tracker:
        yield Mistake(
            "data.advantage",
            f'= "{data.advantage}" compares the members of a group, and data.group_size = 1; set it '
            'to "step_tracker", or data.group_size to 2 or more',
        )
    if data.group_size > 1 and by_tracker:
        yield Mistake(
            "data.group_size",
            f'must be 1 with data.advantage = "{data.advantage}", which compares a trajectory with '
            f"earlier ones of its task, got {data.group_size}",
        )
    if by_tracker and data.tracker_scale == "batch" and data.tracker_margin:
        yield Mistake(
            "data.tracker_margin",
            'must be 0 with data.tracker_scale = "batch", which takes the mean off, '
            f"got {data.tracker_margin:g}",
        )
    if by_tracker and data.discount < 1:
        yield Mistake(
            "data.discount",
            f'must be 1 with data.advantage = "{data.advantage}": trackers expect rewards, not '
            f"returns, got {data.discount:g}",
        )
    for key in ("early_stop", "dynamic_number"):
        if data.group_size == 1 and getattr(data, key):
            yield Mistake(
                f"data.{key}",
                "= true is of groups of several, and data.group_size = 1; set it to false",
            )


def _matched_screens(config: Config) -> Iterator[Mistake]:
    """Keys of screens that nothing reads; parts of a screen that are none."""
    env, data = config.env, config.data
    if env.screen_match != "exact" and data.screen_credit == "off" and not data.fork_weight:
        yield Mistake(
            "env.screen_match",
            f'= "{env.screen_match}" is read by data.screen_credit and data.fork_weight alone, which '
            'are off; leave it at "exact"',
        )
    if env.screen_ignore and env.screen_match == "exact":
        yield Mistake(
            "env.screen_ignore", 'needs env.screen_match = "similar", which alone reads it'
        )
    for left, top, right, bottom in env.screen_ignore:
        if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
            yield Mistake(
                "env.screen_ignore",
                "must have [left, top, right, bottom] as fractions, 0 <= left < right <= 1 and "
                f"0 <= top < bottom <= 1, got {shown([left, top, right, bottom])}",
            )


def _average(train: TrainConfig) -> Iterator[Mistake]:
    """Averages of nothing, and averages that are never used."""
    if train.average_for == "serving" and not train.average:
        yield Mistake(
            "train.average_for",
            '= "serving" publishes averaged weights, and train.average = 0 has none; set that, e.g. '
            'to 0.9, or this to "evaluation"',
        )
    if train.average and train.learner != "torch":
        yield Mistake(
            "train.average",
            f'= {train.average:g} averages weights, and train.learner = "{train.learner}" has none; set 0',
        )


def _objective(train: TrainConfig) -> Iterator[Mistake]:
    """Combinations of [train] for which docs/objective.md has no formula."""
    if 0 < train.dual_clip <= 1:
        yield Mistake(
            "train.dual_clip",
            f"must be > 1, or 0 for no bound, got {train.dual_clip:g}; at most 1 it would stop "
            "every token of a negative advantage",
        )
    if train.dual_clip > 0 and train.objective == "cispo":
        yield Mistake(
            "train.dual_clip",
            f'must be 0 with train.objective = "cispo", which bounds every weight by '
            f"1 + train.clip_high already, got {train.dual_clip:g}",
        )
    if train.mask_low == train.mask_high:
        yield Mistake(
            "train.mask_low",
            f"must be < train.mask_high ({train.mask_high:g}) or nearly every token is masked, "
            f"got {train.mask_low:g}",
        )
    if train.reuse and train.correction == "none":
        yield Mistake(
            "train.reuse",
            f'must be 0 with train.correction = "none", got {train.reuse}: older tokens need weights; set '
            'train.correction = "truncated"',
        )
    if train.normalise == "constant" and train.constant_tokens == 0:
        yield Mistake(
            "train.constant_tokens",
            'must be > 0 with train.normalise = "constant", got 0; set the most tokens that a '
            "trajectory can have, rollout.max_tokens times its steps",
        )


def _task_lists(config: Config) -> dict[str, list[str]]:
    return {
        "env.tasks": config.env.tasks,
        "env.heldout": config.env.heldout,
        "eval.tasks": config.eval.tasks,
        "eval.compositions": config.eval.compositions,
    }


def _lists(config: Config) -> Iterator[Mistake]:
    observe = config.env.observe
    if "screenshot" not in observe:
        yield Mistake("env.observe", f'must have "screenshot", got {shown(observe)}; add it')
    for kind in sorted({each for each in observe if observe.count(each) > 1}):
        yield Mistake("env.observe", f"lists {kind!r} twice; remove one")
    for key, listed in _task_lists(config).items():
        for task_id in sorted({each for each in listed if listed.count(each) > 1}):
            yield Mistake(key, f"lists {task_id!r} twice; remove one")
    for task_id in config.eval.compositions:
        if task_id in config.env.tasks:
            yield Mistake(
                "eval.compositions",
                f"holds {task_id!r}, which env.tasks trains on; remove it from one of them",
            )


def _tasks(config: Config, role: Role | None) -> Iterator[Mistake]:
    """Whether suite, options and every task id exist, and training keeps to its split.

    Where environments are played, whether everything that they need is installed.
    """
    suite = config.env.suite
    try:
        load_suite(suite)
    except TaskError as error:
        yield Mistake("env.suite", f"cannot be used: {error}")
        return
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything
        yield Mistake(
            "env.suite", f"cannot be used: importing {suite} failed, fix it: {_one_line(error)}"
        )
        return
    known = True
    try:
        check_options(suite, config.env.options)
    except TaskError as error:
        known = False
        yield Mistake("env.options", f"cannot be used: {error}")
    observe = observed_kinds(config.env)
    try:
        check_observe(suite, observe)
    except TaskError as error:
        known = False
        yield Mistake("env.observe", f"cannot be used: {error}")
    unknown = False
    for key, listed in _task_lists(config).items():
        wrong = dict(_unknown(suite, listed))
        unknown |= bool(wrong)
        # Where none is known, they are likely those of the suite that was configured before.
        cure = (
            f"; if they are another suite's, set {key}=[] for all"
            if len(wrong) == len(listed)
            else ""
        )
        for why in wrong.values():
            yield Mistake(key, f"cannot be used: {why}{cure}")
    if not unknown:
        yield from _split(config)
    if role in ("data", "serve") or (role is None and not _plays(config)):
        return
    # Options first: a wrong one is told where a program is missing, too.
    wrong_options = list(_options(config)) if known else []
    yield from wrong_options
    try:
        check_parts(suite, config.env.options, _played(config), observe)
    except MissingPartError as error:
        if (missing := _not_here(suite, error)) not in wrong_options:
            yield missing


def _not_here(suite: str, error: MissingPartError) -> Mistake:
    return Mistake("env.suite", f"= {shown(suite)} cannot be played here: {error}")


def _plays(config: Config) -> bool:
    """Whether `dart up` plays in environments of ours."""
    return config.up.envs > 0 or config.eval.around


def _played(config: Config) -> set[str] | None:
    """The ids of all tasks that are trained on or evaluated; None where these cannot be told."""
    try:
        lists = (training_tasks(config), trained_tasks(config), composed_tasks(config))
    except TaskError:
        return None
    return {task.id for tasks in lists for task in tasks}


def _options(config: Config) -> Iterator[Mistake]:
    """Whether the suite accepts the values of its options: an environment is made, but not started.

    A screenshot may lose detail once, and not in two encodings.

    A user's own environment that belongs in a process is not made in this one.
    """
    suite, options = config.env.suite, config.env.options
    if config.env.screenshots == "png" and config.env.screenshot_quality != 100:
        yield Mistake(
            "env.screenshot_quality",
            f'= {config.env.screenshot_quality} is of lossy encodings, and env.screenshots = "png"; set that to '
            '"webp" or "jpeg"',
        )
    before, screenshots = options.get("encoding", "png"), config.env.screenshots
    if screenshots != "png" and before not in ("png", screenshots):
        yield Mistake(
            "env.screenshots",
            f"is {screenshots!r}, but env.options.encoding = {shown(before)} has lost detail before; "
            "remove that option",
        )
    if not options or (config.env.isolation == "process" and suite not in SHIPPED):
        return
    try:
        make_env(suite, **options).close()
    except TaskError as error:
        yield Mistake("env.options", f"cannot be used: {error}")
    except MissingPartError as error:
        yield _not_here(suite, error)
    except (TypeError, ValueError) as error:
        yield Mistake("env.options", f"cannot be used: {_one_line(error)}")
    except Exception as error:  # noqa: BLE001 - not a mistake of the configuration: it may pass
        logger.warning(
            "suite %s cannot make an environment now (%s); until it can, its episodes are invalid; "
            "`dart env check` shows more",
            *(suite, _one_line(error)),
        )


def _unknown(suite: str, listed: Sequence[str]) -> Iterator[tuple[str, TaskError]]:
    """Names and patterns of a list that name no task of the suite, each with the error."""
    for pattern in listed:
        try:
            select_tasks(suite, [pattern])
        except TaskError as error:
            yield pattern, error


def _split(config: Config) -> Iterator[Mistake]:
    """Whether training and evaluation get tasks, and training none that is held out."""
    suite = config.env.suite
    held_here = {
        task.id for pattern in config.env.heldout for task in select_tasks(suite, [pattern])
    }
    for task_id in config.env.tasks:
        if is_pattern(task_id):
            continue
        if find_task(suite, task_id).split == "heldout":
            yield Mistake(
                "env.tasks",
                f"holds {task_id!r}, which its suite keeps out of training; "
                "move it to eval.compositions",
            )
        elif task_id in held_here:
            yield Mistake(
                "env.heldout",
                f"names {task_id!r}, which env.tasks trains on; remove it from one of them",
            )
    for key, tasks in (
        ("env.tasks", training_tasks),
        ("eval.tasks", trained_tasks),
        ("eval.compositions", composed_tasks),
    ):
        try:
            found = tasks(config)
        except TaskError as error:
            yield Mistake(key, f"cannot be used: {error}")
        else:
            if text := unjudged_problem(config.env.judge, found):
                yield Mistake(key, text)


def _model(config: Config, role: Role | None) -> Iterator[Mistake]:
    """Whether the model folder can be loaded, as far as its files show without torch."""
    path = config.model.path
    if role == "rollout" and config.rollout.engine not in MODEL_ENGINES:
        return
    if role in (None, "train") and not needs_model(config):
        return
    if path not in BUILTIN and (text := model_problem(path)):
        yield Mistake("model.path", text)
        return
    if path not in BUILTIN and (text := resize_problem(path, config.policy)):
        yield Mistake("policy.resize_factor", text)
    if config.model.lora is not None:
        yield from lora_mistakes(config, config.model.lora)
    elif config.model.adapters:
        yield Mistake(
            "model.adapters", "needs [model.lora] with the rank, alpha and targets of its adapters"
        )
    if config.policy.pointing == "pointer":
        yield from pointer_mistakes(config)
    if config.policy.verifier:
        yield from verifier_mistakes(config)


def _one_line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:197]}..."
