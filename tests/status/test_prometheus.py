"""The run's numbers elsewhere: Prometheus on loopback, Weights & Biases where asked for."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path

import pytest

from bus.errors import ConfigError, MissingPartError
from dart_cli.config.schema import Config
from dart_cli.data import overview
from dart_cli.status.prometheus import numbers, run_prometheus
from dart_cli.train.metric_writer import MetricWriter, check_wandb
from tests.data.client import serving
from tests.data.parts import MIXED, small_config
from tests.snapshots import snapshot
from tests.waiting import PATIENCE_S


def scrape(url: str) -> dict[str, float]:
    """Series -> value."""
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {series: float(value) for series, value in pairs}


async def test_a_scrape_gives_the_run_on_loopback_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client", reason="pip install -e '.[metrics]'")
    monkeypatch.setattr(overview, "HEARD_AFTER_S", 0.0)
    config = small_config(tmp_path / "run")
    said: list[str] = []
    async with serving(config) as client:
        await client.play_group(MIXED)
        await client.be_heard("env-0")
        metrics = asyncio.create_task(run_prometheus(config, 0, every_s=0.05, say=said.append))
        async with asyncio.timeout(PATIENCE_S):
            while not said:  # noqa: ASYNC110 - a list
                await asyncio.sleep(0.01)
            url = said[0].removeprefix("metrics at ")
            while (found := await asyncio.to_thread(scrape, url))["dart_up"] != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        port = int(url.rpartition(":")[2].partition("/")[0])
        with pytest.raises(ConfigError, match="choose another port"):
            await run_prometheus(config, port, every_s=1.0, say=said.append)
        metrics.cancel()
        await asyncio.gather(metrics, return_exceptions=True)
    assert url.startswith("http://127.0.0.1:")
    assert found["dart_healthy"] == 0  # no trainer runs
    assert found["dart_updates"] == 0
    assert found['dart_verdicts{of="pass"}'] == MIXED.count("pass")
    [alive] = [
        v
        for name, v in found.items()
        if name.startswith("dart_processes_alive{") and "env-0" in name
    ]
    assert alive == 1


def test_every_number_of_a_snapshot_has_its_name_and_labels() -> None:
    found = {
        (name, *sorted(labels.items())): value
        for name, labels, value in numbers(snapshot(replays={"refused": {"stale": 2}}))
    }
    assert found["updates",] == 7
    assert found["tasks_success", ("task_id", "mini/popup")] == 0.5
    assert found["usage_minute", ("of", "playing"), ("role", "env")] == 75
    assert found["replays_refused", ("of", "stale")] == 2
    assert found["staleness_histogram", ("of", "2")] == 5
    assert not [name for name, *_ in found if "curve" in name]


def test_wandb_that_is_not_installed_is_refused_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    check_wandb(Config())
    with pytest.raises(MissingPartError, match="pip install wandb, or leave"):
        check_wandb(Config.model_validate({"train": {"wandb": "gui"}}))


def test_wandb_gets_the_metrics_of_one_run_for_a_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = Config.model_validate({"run": {"dir": tmp_path}, "train": {"wandb": "gui"}})
    for first in (1, 2):
        with MetricWriter(config, first - 1) as curves:
            curves.add(first, {"loss": 0.5})
    runs = list((tmp_path / "wandb").glob("offline-run-*"))
    run_id = (tmp_path / "wandb.id").read_text()
    assert runs
    assert {each.name.rpartition("-")[2] for each in runs} == {run_id}
