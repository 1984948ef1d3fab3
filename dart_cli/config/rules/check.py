"""All rules about a configuration.

check_config   raises the first broken one as one line with key, value, file and cure
find_mistakes  all broken ones, the cheapest to find first
unread         settings that were changed and have no effect, with what alone reads them
reader_of      what alone reads a key, for docs/config.md
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from bus.errors import ConfigError
from dart_cli.config.load import Source
from dart_cli.config.rules import (
    Finding,
    Table,
    found_in,
    learning,
    machine,
    policy,
    tasks,
    value_of,
)
from dart_cli.config.schema import Config

if TYPE_CHECKING:
    from bus.messages import Role  # a type alone: the messages take as long as all of this

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
)


def check_config(
    config: Config, source: Source | None = None, role: Role | Literal["tune"] | None = None
) -> None:
    """Raise ConfigError for the first mistake, for one role or (None) for all of `dart up`.

    An environment or data host needs no model folder, a rollout or train host no environments.
    """
    for found in find_mistakes(config, role):
        raise ConfigError(f"{found} {source.cite(found.subject)}" if source else str(found))


def find_mistakes(config: Config, role: Role | Literal["tune"] | None = None) -> Iterator[Finding]:
    """Every broken rule, the cheapest to find first."""
    asked = _of_up(config) if role is None else frozenset((role,))
    for table in TABLES:
        if (not table.roles or asked.intersection(table.roles)) and table.when(config):
            yield from found_in(table, config)


def _of_up(config: Config) -> frozenset[str]:
    """Return the roles of `dart up`, and `up` itself: without environments of ours, none of those either."""
    plays = config.up.envs > 0 or config.eval.around
    return frozenset(("up", "data", "train", "rollout", "eval" if plays else "serve"))


def unread(config: Config) -> Iterator[tuple[str, str]]:
    """(key, what alone reads it) of settings that differ from their defaults and have no effect."""
    default = Config()
    for words, holds, keys in learning.READERS:
        if not holds(config):
            for key in keys:
                if value_of(config, key) != value_of(default, key):
                    yield key, words


def reader_of(key: str) -> str:
    """Return what alone reads a key, in words; empty where it is always read."""
    return next((words for words, _, keys in learning.READERS if key in keys), "")
