"""A training that is told to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from dart_cli.tune.trainer import Trainer

Keys = dict[str, Any]
Tune = Callable[..., Any]


def stop_after(
    updates: int, monkeypatch: pytest.MonkeyPatch, number: signal.Signals = signal.SIGINT
) -> None:
    """Let a signal come during an update."""
    plain, done = Trainer.update, []

    def update(self: Trainer, *arguments: Any) -> dict[str, float]:
        done.append(1)
        if len(done) == updates:
            signal.raise_signal(number)
        return plain(self, *arguments)

    monkeypatch.setattr(Trainer, "update", update)


def run_and_stop(
    tune: Tune,
    keys: Keys,
    updates: int,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals = signal.SIGINT,
) -> None:
    """A run that ends after so many updates."""
    with monkeypatch.context() as patch:
        stop_after(updates, patch, number)
        with pytest.raises(KeyboardInterrupt):
            tune(keys)
