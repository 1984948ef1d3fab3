"""Slots that a host's limits cannot hold are refused with the number that fits."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from bus.errors import ConfigError
from dart_cli.config.schema import Config
from dart_cli.doctor import machine
from dart_cli.doctor.machine import Limits, excess


def config(slots: int, isolation: str = "thread", envs: int = 1) -> Config:
    return Config.model_validate(
        {"env": {"slots": slots, "isolation": isolation}, "up": {"envs": envs}}
    )


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("envs", [1, 4])
@pytest.mark.parametrize("here", [Limits(1024, None), Limits(None, 2000), Limits(256, 600)])
def test_the_number_that_is_named_fits_and_one_more_does_not(
    isolation: str, envs: int, here: Limits
) -> None:
    problem = excess(config(2048, isolation), envs, here)
    if problem is None:
        assert (isolation, here.threads) == ("thread", None)  # threads take no files
        return
    text, fix = problem
    match = re.search(r"env\.slots = (\d+)", fix)
    assert match is not None
    assert "2048" in text
    # Another limit may bind then: take its number, too.
    alone = replace(here, threads=None) if "open files" in text else replace(here, files=None)
    assert excess(config(int(match[1]), isolation), envs, alone) is None
    assert excess(config(int(match[1]) + 1, isolation), envs, alone) is not None


def test_without_limits_everything_fits_and_a_dry_run_refuses_what_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert excess(config(4096, "process"), 8, Limits(None, None)) is None
    monkeypatch.setattr(machine, "limits", lambda: Limits(1024, 300))
    machine.refuse_slots(config(64), envs=2)
    with pytest.raises(
        ConfigError, match=r"2 x env\.slots = 512 needs 1056 threads.*set env\.slots"
    ):
        machine.refuse_slots(config(512), envs=2)
    [finding] = machine.env_limits(config(512, envs=2))
    assert (finding.subject, finding.level) == ("slots", "error")
    [finding] = machine.env_limits(config(16))
    assert finding.level == "ok"
