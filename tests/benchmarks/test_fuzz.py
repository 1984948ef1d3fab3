"""Noise on every socket and cut files: nothing breaks, hangs or changes; small numbers of fuzz.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.faults.fuzz import (
    KINDS,
    fuzz_configs,
    fuzz_files,
    fuzz_requests,
    fuzz_sockets,
    ledger_of,
)
from benchmarks.faults.fuzz_messages import random_message
from bus.codec import MESSAGES
from bus.errors import UserError
from dart_cli.config.load import load_config
from dart_cli.config.rules.check import check_config
from dart_cli.config.schema import Config, section_types
from dart_cli.config.task_split import training_tasks
from dart_cli.data.ledger import Ledger
from dart_cli.data.scheduler import make_scheduler
from dart_cli.data.store.open import open_store
from dart_cli.runtime.run_dir import claim, save_config
from dart_cli.train.checkpoints.identity import TrainerProgress
from envs.contract.registry import load_suite
from tests.data.parts import MIXED, a_batch, next_batch, play_group, small_config, trained
from tests.train.parts import save
from tests.weights.sets import publish


@pytest.fixture
def config(tmp_path: Path) -> Config:
    made = small_config(tmp_path / "run")
    scripted = made.rollout.model_copy(update={"engine": "scripted"})
    return made.model_copy(update={"rollout": scripted})


def play(config: Config) -> None:
    """A run of two trained groups, one open, with weights and a checkpoint."""
    config.run.dir.mkdir(mode=0o700)
    save_config(config)
    with open_store(config.run.dir) as store:
        tasks = training_tasks(config)
        store.begin_run(0, config.model_dump_json(), tasks)
        ledger = Ledger(config, store, tasks, make_scheduler(config, tasks))
        for _ in range(3):
            play_group(ledger, MIXED)
        a_batch(next_batch(ledger, 0))
        ledger.batch_trained(trained(1))
        store.commit()
    tensors = {"w": torch.zeros(3)}
    publish(tensors, config.run.dir / "weights", 1)
    for updates in (1, 2):
        progress = TrainerProgress(updates=updates, last_batch_id=updates)
        save(config.run.dir / "checkpoints", progress, {**tensors, "w/m": torch.ones(3)})
    with claim(config, "data"):
        pass
    (config.run.dir / "logs").mkdir()
    (config.run.dir / "logs" / "data.log").write_text("x data starts, pid 1, run r\n")
    (config.run.dir / "eval").mkdir()
    (config.run.dir / "eval" / "before.json").write_text("{}")


async def test_noise_on_every_socket_changes_and_breaks_nothing(config: Config) -> None:
    play(config)
    found = await fuzz_sockets(config, 4000, seed=0)
    assert (found["crashed"], found["unanswered"], found["changed"]) == (0, 0, 0)
    assert sum(found["messages_by_socket"].values()) == 4000
    assert set(found["messages_by_socket"]) == set(KINDS)


async def test_well_formed_requests_of_random_values_break_no_handler(config: Config) -> None:
    found = await fuzz_requests(config, 600, seed=0)
    assert (found["requests"], found["requests_crashed"]) == (600, 0)


def test_a_cut_file_of_a_run_is_read_or_refused_in_one_line(config: Config) -> None:
    play(config)
    found = fuzz_files(config.run.dir, 60, seed=0)
    assert found == {"files": 60, "files_crashed": []}


def test_a_mutated_configuration_is_valid_or_refused_in_one_line() -> None:
    assert fuzz_configs(150, seed=0) == {"configs": 150, "configs_crashed": []}


KEYS = [
    f"{section}.{name}" for section, kind in section_types().items() for name in kind.model_fields
]
VALUES = st.recursive(
    st.integers() | st.floats() | st.booleans() | st.text(max_size=20).map(repr),
    lambda inner: st.lists(inner, max_size=3) | st.just("{ a = 1 }"),
    max_leaves=4,
).map(str)


@given(key=st.sampled_from(KEYS), value=VALUES)
def test_any_value_of_any_key_is_taken_or_refused_in_one_line_that_names_the_key(
    key: str, value: str
) -> None:
    starter = Path(__file__).parents[2] / "configs" / "quickstart.toml"
    assert is_one_line(lambda: check_config(load_config(starter, [f"{key}={value}"])))


def is_one_line(attempt: Callable[[], object]) -> bool:
    """Whether it works, or is refused as the user's mistake in one line."""
    try:
        attempt()
    except UserError as error:
        return len(str(error).splitlines()) == 1
    return True


@settings(max_examples=60)
@given(data=st.data())
def test_a_cut_task_file_is_a_suite_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = (Path(__file__).parents[1] / "own_suites" / "coin_suite.py").read_bytes()
    path = tmp_path_factory.mktemp("cut") / "suite.py"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    assert is_one_line(lambda: load_suite(f"{path}:CoinSuite"))


def test_the_fuzz_reaches_every_kind_of_message_and_sees_a_changed_ledger(config: Config) -> None:
    chance = random.Random(0)
    for kind in MESSAGES.values():
        assert isinstance(random_message(kind, chance), kind)
    play(config)
    before = ledger_of(config.run.dir)
    with open_store(config.run.dir) as store:
        store._write("UPDATE trajectories SET reason = 'x' WHERE rowid = 1")
        store.commit()
    assert ledger_of(config.run.dir) != before
