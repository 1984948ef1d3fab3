"""A small run with its store, clock and ledger; a service that waits for little."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dart_cli.config.schema import Config
from dart_cli.data import run_end, service
from dart_cli.data.ledger import Ledger
from dart_cli.data.store.open import open_store
from dart_cli.data.store.writer import Store
from tests.data.parts import (
    Clock,
    make_ledger,
    small_config,
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return small_config(tmp_path / "run")


@pytest.fixture
def store(config: Config) -> Iterator[Store]:
    with open_store(config.run.dir) as store:
        yield store


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(config: Config, store: Store, clock: Clock) -> Ledger:
    return make_ledger(config, store, clock)


@pytest.fixture
def short_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the service answer held requests, and notice dead workers, after a short time."""
    monkeypatch.setattr(service, "HOLD_S", 0.2)
    monkeypatch.setattr(service, "HOUSEKEEPING_S", 0.05)
    monkeypatch.setattr(service, "DEAD_AFTER_S", 0.5)
    monkeypatch.setattr(run_end, "STOP_LEAST_S", 0.2)
    monkeypatch.setattr(service, "SNAPSHOT_S", 0.0)
