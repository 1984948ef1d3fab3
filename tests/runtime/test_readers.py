"""That each process reads the keys that dart_cli/config/readers.py says, and no others."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import dart_cli.policy.loader  # before threads of two processes import it at once
import dart_cli.train.trained_policy
from dart_cli.config.devices import gpus_of
from dart_cli.config.readers import PATHS, PROCESSES, ROWS, row_of
from dart_cli.config.schema import Config, Section, inner_section, section_types
from dart_cli.data import service
from dart_cli.env import worker as env_worker
from dart_cli.rollout import worker as rollout_worker
from dart_cli.runtime.run_dir import IDENTITY
from dart_cli.serve import worker as serve_worker
from dart_cli.train import process
from tests.waiting import PATIENCE_S

KEYS = [
    f"{section}.{key}"
    for section, kind in section_types().items()
    for key, its in kind.model_fields.items()
    if not inner_section(its.annotation)
]
VERBS = {"eval", "up", "tune", "data collect"}

NOT_IN_A_SMALL_RUN = {
    "data": {
        *("data.baseline_margin", "train.checkpoint_every"),
        *("model.path", "rollout.engine"),  # where trajectories are imported
    },
    "env": {
        "env.slots",  # the verb reads it
        *(key for key in KEYS if key.startswith("env.judge.")),
        "model.path",  # with policy.coordinates = "resized"
        "policy.family",
    },
    "rollout": {
        *("data.max_staleness", "rollout.deadline_s"),  # with vLLM, as all of its section
        *(key for key in KEYS if key.startswith(("vllm.", "model.lora."))),
    },
    "train": {*(key for key in KEYS if key.startswith("model.lora.")), "train.gae_lambda"}
    | {"vllm.tensor_parallel"}  # where GPUs are named for engines
    | {"teacher.model"},  # with train.teacher_weight
    "serve": {
        *("env.suite", "model.path", "policy.family"),
        *("rollout.max_tokens", "rollout.temperature", "run.seed"),  # when an episode is opened
    },
}
"""Keys that a process reads under conditions that the run below does not meet."""


class Reads:
    """Which role has read which key: each has a copy of the configuration."""

    def __init__(self) -> None:
        self.by_role: dict[str, set[str]] = defaultdict(set)
        self._owner: dict[int, tuple[str, str, Section]] = {}  # id of a section -> role, its name

    def copy(self, config: Config, role: str) -> Config:
        """A copy of the role's own."""
        mine = config.model_copy(deep=True)
        for name in section_types():
            part: Any = mine
            for each in name.split("."):
                part = getattr(part, each, None)
            if part is not None:
                self._owner[id(part)] = (role, name, part)
        return mine

    def note(self, section: Section, key: str) -> None:
        """`key` of a section was read."""
        if owner := self._owner.get(id(section)):
            self.by_role[owner[0]].add(f"{owner[1]}.{key}")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    result = Reads()
    keys = {
        kind: {k for k, its in kind.model_fields.items() if not inner_section(its.annotation)}
        for kind in section_types().values()
    }
    plain = Section.__getattribute__

    def noting(self: Section, name: str) -> Any:
        if name in keys.get(type(self), ()):
            result.note(self, name)
        return plain(self, name)

    monkeypatch.setattr(Section, "__getattribute__", noting)
    return result


@pytest.fixture
def one_load_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the threads of two processes load their models one after the other: transformers' loading is one for a process."""
    lock, through = threading.Lock(), dart_cli.policy.loader.load_policy

    def load_policy(*args: Any, **options: Any) -> Any:
        with lock:
            return through(*args, **options)

    for module in (dart_cli.policy.loader, dart_cli.train.trained_policy):
        monkeypatch.setattr(module, "load_policy", load_policy)


@pytest.mark.usefixtures("one_load_at_a_time")
async def test_each_process_of_a_run_reads_the_keys_that_the_table_says(
    tmp_path: Path, reads: Reads
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    config = Config.model_validate(
        {
            "run": {"dir": run_dir},
            "env": {"slots": 4, "tasks": ["mini/click"]},
            "data": {"group_size": 2, "groups_per_batch": 1},
            "train": {"updates": 1, "lr": 1e-5},
            "serve": {"port": 0},
        }
    )
    its = {role: reads.copy(config, role) for role in PROCESSES}
    for role, mine in its.items():
        gpus_of(mine, role, f"{role}-0")
    stop = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(
            service.run(its["data"], stop),
            env_worker.run(its["env"], "env-0", 4, stop),
            rollout_worker.run(its["rollout"], "rollout-0", stop),
            serve_worker.run(its["serve"], "serve-0", stop),
            process.run(its["train"], stop),
        )
    for role in PROCESSES:
        output = {key for key in KEYS if role in row_of(key).readers}
        free = {key for key in KEYS if role in row_of(key).free}
        read = reads.by_role[role]
        assert read - output - free == set(), f"dart {role} reads more than its rows say"
        assert output - read - free == NOT_IN_A_SMALL_RUN[role], f"rows of dart {role}"


def test_every_key_has_a_reader_and_every_row_has_a_key() -> None:
    for key in KEYS:
        assert row_of(key).readers, key
        assert {*row_of(key).readers} <= {*PROCESSES, *VERBS}
    used = {row_of(key).keys for key in KEYS}
    named = [row.keys for row in ROWS]
    assert len(named) == len({*named})
    assert {*named} - used <= {*section_types()}  # one whose keys all have rows of their own
    assert {*KEYS} >= PATHS


def test_a_key_that_one_process_alone_reads_need_not_be_equal_in_two() -> None:
    for key in KEYS:
        row = row_of(key)
        if {*row.readers} == {"data"}:
            assert not row.equal, key


def test_what_makes_a_run_another_must_be_equal_in_its_processes() -> None:
    assert all(row_of(key).equal for key in IDENTITY)
