"""Which process of a run reads which key of the configuration, and which keys differ between two processes.

    Row            a section or key, the processes that read it, and why they must have the same value
    ROWS           all rows; the row of a key is the one with the longest name that fits
    read_by        the processes that read a section, as a sentence for docs/config.md
    Settings       the values with which a process was started, where they are not the defaults
    is_overridden  returns True if a --set names a key
    differences    the keys whose values differ between a process and the data service

Every process of a run has its own command line. It sends its settings to the data service when it joins
(dart_cli/runtime/joining.py), which compares them by these rows (dart_cli/data/settings.py).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from dart_cli.config.families import AUTO, FAMILY_KEY, VALUES
from dart_cli.config.rules import value_of
from dart_cli.config.schema import Config, inner_section, section_types

PROCESSES = ("data", "train", "rollout", "env", "serve")
"""The processes of a run, by their roles."""

_PLAY = ("env", "serve")
_HISTORY = (
    "family",
    "action_parser",
    "max_actions",
    "coordinates",
    "template",
    "history_images",
    "history_images_most",
    "history_turns",
)
"""Keys of [policy] by which a process that plays chooses what a prompt shows, and reads the completion."""
_TOKENS = "the engine's log-probabilities would not be those that the trainer computes"
_PROMPTS = "a screen would become another prompt, or a text another action"
_THE_END = "the data service and the trainer would not agree when the run is over"


class Row(NamedTuple):
    """A section or a key, and which processes and commands read it.

    The stored configuration of a run has the value of the first reader. Where `equal` is set, readers with
    different values are refused; its text is what would go wrong. `free` names processes whose values are not
    compared.
    """

    keys: str
    readers: tuple[str, ...]
    equal: str = ""
    free: tuple[str, ...] = ()


ROWS = (
    # Processes that are compared have reached each other already, so they may name the host differently, and
    # have the keys in other folders.
    Row("bus", PROCESSES, free=PROCESSES),
    Row("run", ("data",)),
    # In a run over tcp, processes that play and rollout workers keep their logs in a folder of their host.
    Row(
        "run.dir",
        PROCESSES,
        equal="the trainer's checkpoints would belong to another run than the data service's records",
        free=("rollout", *_PLAY),
    ),
    Row("run.seed", ("data", "train", "serve")),
    Row("model", ("train", "rollout"), equal=_TOKENS),
    Row("model.path", ("train", "rollout", "data", *_PLAY), equal=_TOKENS),
    Row("model.freeze_vision", ("train",)),
    Row("model.adapters", ("train", "rollout")),  # workers serve what the trainer publishes
    Row("policy", ("rollout",), equal=_PROMPTS),
    *(Row(f"policy.{key}", ("rollout", *_PLAY), equal=_PROMPTS) for key in _HISTORY),
    Row("policy.pointing", ("rollout", "data", "train"), equal=_PROMPTS),
    Row("env", ("env",)),
    Row(
        "env.suite",
        ("data", *_PLAY, "rollout"),
        equal="an environment cannot play the tasks of another suite",
    ),
    Row("env.tasks", ("data",)),
    Row("env.heldout", ("data",)),
    Row("env.seeds", ("data",)),
    # Engines size their caches of screens by these two.
    Row("env.slots", ("env", "rollout")),
    Row("env.options", ("env", "rollout")),
    Row("env.screenshots", _PLAY),
    Row("rollout", ("rollout",)),
    Row("rollout.engine", ("rollout", "data", "train")),
    Row(
        "rollout.temperature",
        ("data", "serve"),
        equal="the trainer would divide logits by another temperature than the samples were drawn with",
    ),
    Row(
        "rollout.max_tokens",
        ("data", "serve"),
        equal="completions would be cut off at two lengths",
    ),
    Row("rollout.deadline_s", (*_PLAY, "rollout")),
    # GPUs are divided between the trainer and the rollout workers by this key and the keys of [up].
    Row("rollout.device", ("rollout", "train")),
    Row("vllm", ("rollout",)),
    Row("vllm.tensor_parallel", ("rollout", "train")),
    Row("serve", ("serve",)),
    Row("data", ("data",)),
    Row("data.max_staleness", ("data", "rollout", *_PLAY)),
    Row("train", ("train",)),
    Row("train.learner", ("train", "rollout")),
    Row("train.replay_routing", ("train", "rollout")),
    Row("train.updates", ("data", "train"), equal=_THE_END),
    Row(
        "train.teacher_weight",
        ("train", "data", "env"),
        equal="groups of equal rewards would be dropped although a teacher scores them, or the reverse",
    ),
    Row("train.max_minutes", ("data", "train"), equal=_THE_END),
    Row("train.max_trajectories", ("data", "train"), equal=_THE_END),
    Row("train.stop_at", ("data",)),
    Row("train.attention_minutes", ("data",)),
    Row("train.reuse", ("data",)),
    Row("train.checkpoint_every", ("train", "data")),
    Row("train.ranks", ("train", "rollout")),
    Row("train.device", ("train", "rollout")),
    Row("weights", ("train",)),
    Row(
        "weights.channel",
        ("train", "rollout"),
        equal="workers would wait for weights that the trainer sends in another way",
    ),
    Row(
        "weights.publish_every",
        ("train", "data"),
        equal="the data service would count another staleness than there is",
    ),
    Row("weights.concurrent", ("data",)),
    # These are read by commands that are no process of a run. Where a shell sets CUDA_VISIBLE_DEVICES, it
    # counts instead of [up].
    Row("up", ("up", "train", "rollout"), free=PROCESSES),
    Row("eval", ("eval", "up"), free=PROCESSES),
    Row("tune", ("tune",), free=PROCESSES),
    Row("teacher", ("data collect",), free=PROCESSES),
    Row("teacher.model", ("train", "data collect")),
    Row(
        "teacher.hints",
        ("env", "train"),
        equal="a teacher would wait for hints that no step has, or the reverse",
    ),
)

PATHS = frozenset(
    {
        "run.dir",
        "model.path",
        "model.adapters",
        "policy.action_parser",
        "policy.verifier",
        "teacher.model",
        "env.suite",
        "rollout.engine",
        "train.learner",
        "weights.directory",
        "data.pool",
    }
)
"""Keys that may name a file. Two spellings of one path are the same value, and paths of different hosts are
not compared."""

_FAMILY = frozenset({FAMILY_KEY, *(f"policy.{key}" for key in VALUES)})
"""Keys that a family of models sets."""


def read_by(section: str) -> str:
    """Return which processes read the keys of a section, as a sentence with code marks."""
    usual = row_of(section).readers
    others: dict[tuple[str, ...], list[str]] = {}
    for key, field_info in section_types()[section].model_fields.items():
        readers = row_of(f"{section}.{key}").readers
        if readers != usual and not inner_section(field_info.annotation):
            others.setdefault(readers, []).append(f"`{key}`")
    parts = [f"{', '.join(keys)} by {_enumerate(readers)}" for readers, keys in others.items()]
    begin = "Read in a run by" if {*usual}.intersection(PROCESSES) else "Read by"
    return f"{begin} {'; '.join([_enumerate(usual), *parts])}."


def _enumerate(readers: tuple[str, ...]) -> str:
    """Return the commands of readers in a list with "and", as code."""
    *first, last = [f"`dart {reader}`" for reader in readers]
    return f"{', '.join(first)} and {last}" if first else last


@cache
def row_of(key: str) -> Row:
    """Return the row of a key: the one with the longest name that fits."""
    fits = [row for row in ROWS if key == row.keys or key.startswith(f"{row.keys}.")]
    return max(fits, key=lambda row: len(row.keys))


def values(config: Config) -> dict[str, Any]:
    """Return the value of every key as JSON has it; None where its section is unset."""
    by_key: dict[str, Any] = {}
    for section, kind in section_types().items():
        part = value_of(config, section)
        dumped = {} if part is None else part.model_dump(mode="json")
        for key, field_info in kind.model_fields.items():
            if not inner_section(field_info.annotation):
                by_key[f"{section}.{key}"] = dumped.get(key)
    if "lr" not in config.train.model_fields_set:
        # It follows from the model, and some hosts have no model folder.
        by_key["train.lr"] = None
    return by_key


@cache
def _defaults() -> Mapping[str, Any]:
    """Return the default of every key."""
    return values(Config())


@dataclass(frozen=True)
class Settings:
    """The values with which a process was started, and where its relative paths begin."""

    changed: Mapping[str, Any]  # key -> value, where it is not the default
    host: str = field(default_factory=socket.gethostname)
    folder: str = field(default_factory=os.getcwd)  # the current directory

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Return the settings of this process."""
        default = _defaults()
        return cls({key: value for key, value in values(config).items() if value != default[key]})

    def value(self, key: str) -> Any:
        """Return the value of a key as JSON has it."""
        return self.changed.get(key, _defaults().get(key))

    def agrees(self, other: Settings, key: str) -> bool:
        """Return True if both have the same value of a key, or if the values cannot be compared."""
        mine, theirs = self.value(key), other.value(key)
        if mine == theirs:
            return True
        if key in _FAMILY and AUTO in (self.value(FAMILY_KEY), other.value(FAMILY_KEY)):
            return True  # only a host with the model folder can resolve `auto`
        if key in PATHS:
            if self.host != other.host:
                return _is_path(mine) or _is_path(theirs)
            return bool(self._whole(mine) == other._whole(theirs))
        return False

    def _whole(self, name: Any) -> Any:
        """Return a path, or the path in `file.py:Suite`, as an absolute one; return other names unchanged."""
        if isinstance(name, list):
            return [self._whole(element) for element in name]
        if not isinstance(name, str):
            return name
        if not (_is_path(name) or (Path(self.folder) / name).exists()):
            return name
        path, colon, own = name.partition(".py:")
        return os.path.realpath(Path(self.folder) / path) + colon + own


def _is_path(name: Any) -> bool:
    """Return True for a text that is a path with folders or `file.py:Name`, or for a list that has one."""
    if isinstance(name, list):
        return any(map(_is_path, name))
    return isinstance(name, str) and (os.sep in name or ".py:" in name)


def is_overridden(key: str, overrides: Collection[str]) -> bool:
    """Return True if one of the names in --set is the key, a part of it, or its section."""
    return any(f"{name}.".startswith(f"{key}.") or key.startswith(f"{name}.") for name in overrides)


def differences(mine: Settings, theirs: Settings) -> Iterator[str]:
    """Yield the keys whose values differ, in the order of the schema."""
    for key in _defaults():
        if (key in mine.changed or key in theirs.changed) and not mine.agrees(theirs, key):
            yield key
