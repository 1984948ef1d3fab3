"""What `--dry-run` shows of scheduling is what the scheduler does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dart_cli.config.dry_run import describe
from dart_cli.config.endpoints import run_endpoints
from dart_cli.config.load import load_config
from dart_cli.config.rules import value_of
from dart_cli.config.rules.check import TABLES, unread
from dart_cli.config.rules.learning import READERS
from dart_cli.config.schema import Config, WeightsConfig
from dart_cli.config.task_split import training_tasks
from dart_cli.data.groups import GroupTable
from dart_cli.data.scheduler import Situation, make_scheduler

ROOT = Path(__file__).parents[2]
ARMS: list[dict[str, Any]] = [
    {},
    {"max_open_groups": 12},
    {"scheduling": "batch", "max_staleness": 0},
    {"scheduling": "april", "groups_per_batch": 10},
    {"scheduling": "oversample"},
]


def told(config: Config) -> str:
    return dict(describe(config, "data"))["batch"]


@pytest.mark.parametrize("data", ARMS)
@pytest.mark.parametrize(("publish_every", "reuse"), [(1, 0), (3, 0), (1, 1), (3, 2)])
def test_the_dry_run_shows_the_schedulers_limit(
    data: dict[str, Any], publish_every: int, reuse: int
) -> None:
    config = Config.model_validate(
        {"data": data, "weights": {"publish_every": publish_every}, "train": {"reuse": reuse}}
    )
    scheduler = make_scheduler(config, training_tasks(config))
    limit = scheduler.limit(Situation(GroupTable()))
    assert f"at most {limit} groups in flight" in told(config)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"group_size": 4}, "8 groups of 4 (32 trajectories), at most"),
        (
            {"group_size": 1, "advantage": "task_baseline", "groups_per_batch": 4},
            "4 trajectories, no groups, at most 20 trajectories in flight",
        ),
    ],
)
def test_the_dry_run_shows_what_an_update_is_made_of(settings: dict[str, Any], words: str) -> None:
    assert told(Config.model_validate({"data": settings})).startswith(words)


def test_the_dry_run_shows_how_many_ports_a_run_over_tcp_takes() -> None:
    config = Config.model_validate({"bus": {"host": "127.0.0.1", "port": 7800}})
    ports = {int(each.rpartition(":")[2]) for each in run_endpoints(config).overrides.values()}
    assert ports == {7800, 7801, 7802, 7803}
    data = "data service at tcp://127.0.0.1:7800 and the two ports above"
    assert dict(describe(config))["bus"] == f"{data} (loopback, no keys)"
    broadcast = config.model_copy(update={"weights": WeightsConfig(channel="gloo")})
    assert dict(describe(broadcast))["bus"].startswith(f"{data}, the trainer at the third (")


def test_the_dry_run_shows_the_keys_that_differ_from_their_defaults() -> None:
    changed = Config.model_validate(
        {
            "train": {"updates": 7, "recompute": "none"},
            "model": {"lora": {"rank": 8}},
            "policy": {
                "history_images": 2,
                "history_turns": 2,
                "template": 40 * "a {instruction} ",
            },
        }
    )
    lines = dict(describe(changed))
    assert lines["[train]"] == "updates = 7"  # "none" is the default
    assert lines["[model.lora]"] == "rank = 8"
    assert "[env]" not in lines
    assert lines["[policy]"].startswith(
        "history_images = 2, history_turns = 2, template = 'a {inst"
    )
    assert len(lines["[policy]"]) < 120


def test_settings_that_nothing_reads_are_told_with_what_reads_them() -> None:
    assert "warning" not in dict(describe(Config()))
    changed: dict[str, Any] = {"data": {"baseline_margin": 0.1}}
    told = dict(describe(Config.model_validate(changed)))["warning"]
    assert told == "no effect: data.baseline_margin (only with data.advantage by running baselines)"
    changed["data"] |= {"group_size": 1, "advantage": "task_baseline"}
    assert "warning" not in dict(describe(Config.model_validate(changed)))


def test_every_key_of_a_rule_is_one_of_the_schema() -> None:
    keys = [key for reader in READERS for key in reader.keys]
    keys += [rule.key for table in TABLES for rule in table.rows]
    full = Config.model_validate(
        {"model": {"lora": {}}, "env": {"judge": {}}, "teacher": {"policy": {}}}
    )
    for key in keys:
        section, _, name = key.rpartition(".")
        assert hasattr(value_of(full, section), name), key


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem
)
def test_shipped_configurations_set_nothing_without_effect(path: Path) -> None:
    assert list(unread(load_config(path))) == []
