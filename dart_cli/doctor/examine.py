"""Everything the doctor examines, in order; each finding is given as soon as it is made.

examine     findings of this host, of a configuration on it, of one episode
run_doctor  prints them; returns the exit code
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console

from bus.errors import DartError, RunDirectoryError
from dart_cli.config.devices import NO_GPU
from dart_cli.config.load import config_of_model, load_config, refuse_overrides
from dart_cli.config.model_folder import is_model_folder
from dart_cli.config.rules import Finding, value_of
from dart_cli.config.schema import Config
from dart_cli.config.values import to_toml
from dart_cli.doctor import guests, machine
from dart_cli.doctor import run_checks as run
from dart_cli.doctor.plan_findings import plan
from dart_cli.doctor.vllm_parts import vllm_parts
from dart_cli.runtime.findings import (
    as_json,
    error,
    is_healthy,
    ok,
    print_finding,
    run_check,
    summary,
)
from dart_cli.runtime.run_dir import read_run

Check = Callable[[], Iterable[Finding]]
_UNFIT = ("plan", "up.train_gpus", "up.rollout_gpus", "train.ranks")
"""Subjects of errors that say that a run does not fit this host."""
_GPU_KEYS = (
    *("rollout.device", "train.device", "weights.channel"),
    *("up.train_gpus", "up.rollout_gpus"),
)
"""Keys that may ask for GPUs."""


def run_doctor(
    target: Path | None,
    overrides: list[str],
    *,
    played: bool = False,
    compared: bool = False,
    read: bool = False,
    steps: int | None = None,
    in_json: bool = False,
) -> int:
    """Examine and print, planning episodes of `steps`; returns 0 where a run can work, 2 where it cannot fit, else 1."""
    console = Console(markup=False, highlight=False)
    found: list[Finding] = []
    stopped = 0
    try:
        for finding in examine(
            target, overrides, played=played, compared=compared, read=read, steps=steps
        ):
            found.append(finding)
            if not in_json:
                print_finding(console, finding)
    except SystemExit as stop:  # by a signal: what was found is printed
        stopped = int(stop.code or 1)
    if in_json:
        sys.stdout.write(json.dumps(as_json(found)) + "\n")
    else:
        console.print(summary(found))
    if stopped or is_healthy(found):
        return stopped
    return 2 if any(each.subject in _UNFIT and each.level == "error" for each in found) else 1


def examine(
    target: Path | None,
    overrides: list[str],
    *,
    played: bool = False,
    compared: bool = False,
    read: bool = False,
    steps: int | None = None,
) -> Iterator[Finding]:
    """Yield findings of this host, and of `target` on it: a TOML file, run directory or model folder.

    After them come, where they are asked for, those of one episode (`played`), of every weight's
    value (`read`), and of engine against trainer (`compared`).
    """
    config: Config | None = None
    of_model = target is not None and is_model_folder(target)
    if target is not None:
        try:
            config = _config(target, overrides, of_model=of_model)
        except DartError as fault:
            yield error("config", str(fault), "fix it first; the host is examined without it")
        else:
            yield ok("config", f"{target} can be read")
    checks = _of_host(config)
    if config is not None:
        checks |= _of_model(config) if of_model else _of_run(config, steps)
        more = {
            "episode": (played, _play),
            "values": (read, run.values),
            "parity": (compared, _compare),
        }
        checks |= {name: partial(check, config) for name, (asked, check) in more.items() if asked}
    lacks_gpus = False
    for subject, check in checks.items():
        for finding in run_check(subject, check):
            if lacks_gpus and finding.subject in _GPU_KEYS and NO_GPU in finding.text:
                continue  # it follows from the finding about the GPUs, which names its key
            lacks_gpus |= finding.subject == "gpu" and finding.level == "error"
            yield finding


def _of_host(config: Config | None) -> dict[str, Check]:
    suite, vllm = None, config is not None and config.rollout.engine == "vllm"
    if config is not None and "url" not in config.env.options:
        suite = config.env.suite  # a guest that runs already has its programs where it runs
    return {
        "python": machine.python,
        "packages": machine.packages,
        "gpu": partial(machine.gpus, "" if config is None else _asking_gpus(config)),
        **({"vllm": vllm_parts} if vllm else {}),
        "programs": partial(machine.programs, suite),
        "guests": guests.guests,
        "memory": machine.memory,
        "shared memory": machine.shared_memory,
        "open files": machine.open_files,
    }


def _of_model(config: Config) -> dict[str, Check]:
    return {
        "model": partial(run.model_folder_alone, config),
        "family": partial(run.family, config, of_model=True),
    }


def _of_run(config: Config, steps: int | None) -> dict[str, Check]:
    return {
        "config": partial(run.configuration, config),
        "run directory": partial(run.directory, config),
        "ports": partial(run.ports, config),
        "model": partial(run.model, config),
        "family": partial(run.family, config),
        "train.lr": partial(run.learning_rate, config),
        "plan": partial(plan, config, steps),
        "compute modes": partial(machine.compute_modes, config),
        "slots": partial(machine.env_limits, config),
        "tasks": partial(run.tasks, config),
    }


def _config(target: Path, overrides: list[str], *, of_model: bool) -> Config:
    if of_model:
        return config_of_model(target, overrides)
    if not target.is_dir():
        return load_config(target, overrides)
    refuse_overrides(target, overrides)
    if not (target / "config.json").exists():
        raise RunDirectoryError(
            f"{target}: no config.json, so it is no run directory and no model folder; name one of "
            "them, or the TOML file of a run"
        )
    return read_run(target)


def _asking_gpus(config: Config) -> str:
    """Return the keys that ask for GPUs, with their values."""
    values = {key: value_of(config, key) for key in _GPU_KEYS}
    without = ("auto", "cpu", "file", "gloo")
    asked = {key: value for key, value in values.items() if value and value not in without}
    return ", ".join(f"{key} = {to_toml(value)}" for key, value in asked.items())


def _play(config: Config) -> Iterator[Finding]:
    from dart_cli.doctor.trial_episode import play  # late: loads the engine's parts

    yield from play(config)


def _compare(config: Config) -> Iterator[Finding]:
    from dart_cli.doctor.logprob_check import parity  # late: loads the model

    yield from parity(config)
