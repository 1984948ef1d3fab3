"""Checks a configuration by all rules.

check_config   raises the first broken rule as one line with key, value, file and fix
find_mistakes  yields all broken rules, the cheapest to check first
unread         yields settings that were changed and have no effect
reader_of      the condition under which a key is read, for docs/config.md
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from bus.errors import ConfigError
from dart_cli.config.load import Source
from dart_cli.config.rules import (
    Finding,
    Table,
    broken_rules,
    learning,
    machine,
    policy,
    tasks,
    teacher,
    value_of,
)
from dart_cli.config.schema import Config

if TYPE_CHECKING:
    # Only types need it, and importing the messages takes as long as all other imports together.
    from bus.messages import Role

TABLES: tuple[Table, ...] = (
    policy.POLICY,
    learning.POOL,
    learning.DATA,
    learning.TRAIN,
    learning.EVAL,
    learning.TUNE,
    tasks.ENV,
    machine.GPUS,
    machine.OF_UP,
    machine.PLACES,
    policy.JUDGE,
    tasks.TASKS,
    tasks.PLAYED,
    policy.MODEL,
    policy.SERVED,
    policy.SCREENS,
    machine.WORKERS,
    machine.TRAINER,
    machine.NCCL,
    policy.OWN_ENGINE,
    policy.OWN_LEARNER,
    policy.VLLM,
    teacher.TEACHER,
    teacher.SCORES,
)


def check_config(
    config: Config,
    source: Source | None = None,
    role: Role | Literal["tune", "teacher"] | None = None,
) -> None:
    """Raise ConfigError for the first broken rule of one role, or, for None, of all processes of `dart up`.

    A host with only environments or the data service needs no model folder, and a host with only rollout
    workers or the trainer needs no environments.
    """
    for mistake in find_mistakes(config, role):
        raise ConfigError(f"{mistake} {source.cite(mistake.subject)}" if source else str(mistake))


def find_mistakes(
    config: Config, role: Role | Literal["tune", "teacher"] | None = None
) -> Iterator[Finding]:
    """Yield every broken rule of a role (None: of `dart up`), the cheapest to check first."""
    roles = _of_up(config) if role is None else frozenset((role,))
    for table in TABLES:
        if (not table.roles or roles.intersection(table.roles)) and table.when(config):
            yield from broken_rules(table, config)


def _of_up(config: Config) -> frozenset[str]:
    """Return the roles of `dart up`, and `up` itself.

    Without environments of dart, `serve` takes their place.
    """
    plays = config.up.envs > 0 or config.eval.around
    return frozenset(("up", "data", "train", "rollout", "eval" if plays else "serve"))


def unread(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key that was changed but is not read, with the condition under which it would be."""
    default = Config()
    for words, holds, keys in learning.READERS:
        if not holds(config):
            for key in keys:
                if value_of(config, key) != value_of(default, key):
                    yield key, words


def reader_of(key: str) -> str:
    """Return the condition under which a key is read, in words; empty where it is always read."""
    return next((words for words, _, keys in learning.READERS if key in keys), "")
