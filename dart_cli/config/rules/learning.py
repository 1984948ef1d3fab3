"""Rules about what is learned from, how, and what is evaluated: of [data], [train], [eval], [tune]."""

from __future__ import annotations

from pathlib import Path

from dart_cli.config.rules import Reader, Rule, Table, twice
from dart_cli.config.rules.machine import cannot_be_made, unreadable
from dart_cli.config.schema import (
    BY_BASELINE,
    Config,
    RunConfig,
    TrainConfig,
    TuneConfig,
)

TUNE_READS = ("weight_decay", "grad_clip", "device", "threads", "recompute", "pack_tokens")
"""Keys of [train] that `dart tune` reads, too."""


def read_by_tune(config: Config) -> Config:
    """Return what `dart tune` reads of `config`: [model], [policy], [tune], `run.seed` and TUNE_READS."""
    train = TrainConfig(**{key: getattr(config.train, key) for key in TUNE_READS})
    return Config(
        run=RunConfig(seed=config.run.seed),
        model=config.model,
        policy=config.policy,
        train=train,
        tune=config.tune,
    )


def _by_baseline(config: Config) -> bool:
    """Return True if trajectories are compared with running baselines."""
    return config.data.advantage in BY_BASELINE


def _of_groups(key: str) -> Rule:
    """Return the rule that a switch of [data] for groups is off where the group size is 1."""
    return Rule(
        f"data.{key}",
        lambda c: c.data.group_size == 1 and getattr(c.data, key),
        "= true is of groups of several, and data.group_size = 1; set it to false",
    )


DATA = Table(
    (
        Rule(
            "data.max_open_groups",
            lambda c: 0 < c.data.max_open_groups < c.data.groups_per_batch,
            "must be >= data.groups_per_batch ({data.groups_per_batch}) or no batch ever fills, got {value}",
        ),
        Rule(
            "data.advantage",
            lambda c: c.data.group_size == 1 and not _by_baseline(c),
            '= "{data.advantage}" compares the members of a group, and data.group_size = 1; set it to '
            '"step_baseline", or data.group_size to 2 or more',
        ),
        Rule(
            "data.group_size",
            lambda c: c.data.group_size > 1 and _by_baseline(c),
            'must be 1 with data.advantage = "{data.advantage}", which compares a trajectory with '
            "earlier ones of its task, got {value}",
        ),
        *map(_of_groups, ("early_stop", "dynamic_number")),
        Rule(
            "data.pool_ratio",
            lambda c: 0 < c.data.pool_ratio < 1 / (c.data.group_size + 1) and _least_ratio(c),
            "must be 0 or >= {detail}, one success beside data.group_size = {data.group_size} "
            "failures, got {value}",
        ),
    )
)

POOL = Table(
    (
        Rule(
            "data.pool",
            lambda c: next(filter(None, map(unreadable, c.data.pool)), ""),
            "cannot be read: {detail}; choose another, got {value}",
            ends=True,
        ),
        Rule(
            "data.pool_ratio",
            lambda c: c.data.pool and not c.data.pool_ratio,
            "must be > 0, e.g. 0.125, or data.pool is never drawn from",
        ),
        Rule(
            "data.pool",
            lambda c: next((folder for folder in c.data.pool if not folder.exists()), None),
            "has {detail}, which does not exist; `dart data collect` and `dart data export` write such folders",
        ),
    ),
    ("data",),
)


def _least_ratio(config: Config) -> str:
    """Return the least `data.pool_ratio` at which one success may join a group, as text."""
    return f"{1 / (config.data.group_size + 1):.4g}"


TRAIN = Table(
    (
        Rule(
            "train.warmup",
            lambda c: c.train.warmup > c.train.updates > 0,
            "must be <= train.updates ({train.updates}) or the learning rate never reaches train.lr, "
            "got {value}",
        ),
        Rule(
            "train.reuse",
            lambda c: c.train.reuse and c.train.correction == "none",
            'must be 0 with train.correction = "none", got {value}: older tokens need importance sampling; set '
            'train.correction = "truncated"',
        ),
        Rule(
            "train.critic",
            lambda c: c.train.critic != "off" and not _by_baseline(c),
            '= {value} takes the place of running baselines; set data.advantage = "step_baseline" and '
            "data.group_size = 1",
        ),
    )
)

EVAL = Table(
    (
        Rule(
            "eval.episodes",
            lambda c: c.eval.around and c.eval.episodes == 0,
            "must be >= 1 with eval.around = true, got 0; or set it to false",
        ),
    )
)


def _points(config: Config) -> bool:
    """Return True if the policy points with a pointer head."""
    return config.policy.pointing == "pointer"


def _is_set(config: Config, key: str) -> bool:
    """Return True if a key of [tune] differs from its default."""
    return bool(getattr(config.tune, key) != TuneConfig.model_fields[key].default)


def _of_pointers(key: str) -> Rule:
    """Return the rule that a key of [tune] is set only for a policy with a pointer head."""
    return Rule(
        f"tune.{key}",
        lambda c: not _points(c) and _is_set(c, key),
        'is of pointers; set policy.pointing = "pointer", or leave it out',
    )


TUNE = Table(
    (
        Rule(
            "tune.data",
            lambda c: not c.tune.data,
            "is empty; name what is learned from, e.g. --data sets/made/train",
        ),
        twice("tune.data"),
        Rule(
            "tune.out",
            lambda c: c.tune.out is None,
            "is unset; name the folder to make, e.g. --out runs/models/tuned",
        ),
        Rule(
            "tune.out",
            lambda c: c.tune.out and c.tune.out.exists(),
            "exists: {tune.out}; name a folder that does not",
        ),
        Rule(
            "tune.out",
            lambda c: c.tune.out and not c.tune.out.exists() and cannot_be_made(c.tune.out),
            "= {value} cannot be made: {detail}; choose another",
        ),
        _of_pointers("target"),
        Rule(
            "tune.write",
            lambda c: c.tune.write == "adapters" and c.model.lora is None,
            '= "adapters" needs adapters: set model.lora, e.g. model.lora.rank = 16',
        ),
        Rule(
            "tune.write",
            lambda c: c.tune.write == "adapters" and _points(c),
            '= "adapters" leaves out the pointer head and the embeddings of its tokens, which are '
            'trained, too; set "model"',
        ),
        Rule(
            "tune.data",
            lambda c: next((path for path in c.tune.data if not Path(path).exists()), None),
            "names {detail}, which does not exist; name an existing file or folder",
        ),
    ),
    ("tune",),
)

READERS = (
    Reader("data.advantage by running baselines", _by_baseline, ("data.baseline_margin",)),
    Reader('train.critic = "gae"', lambda c: c.train.critic == "gae", ("train.gae_lambda",)),
)
