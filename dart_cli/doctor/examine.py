"""Run all checks of `dart doctor` in order, and print each finding as soon as there is one.

examine     yields findings about this host, about a configuration on it, and about one episode
run_doctor  prints them and returns the exit code
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console

from bus.errors import DartError, RunDirectoryError, UserError
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
    exit_code,
    ok,
    print_finding,
    run_check,
    summary,
)
from dart_cli.runtime.run_dir import read_run

Check = Callable[[], Iterable[Finding]]
_UNFIT = ("plan", "up.train_gpus", "up.rollout_gpus", "train.ranks")
"""Subjects of the errors which mean that a run does not fit this host."""
_LOADING = ("values", "parity")
"""Checks that load the model. An error of its folder that another check has reported is not repeated."""
_GPU_KEYS = (
    "rollout.device",
    "train.device",
    "weights.channel",
    "up.train_gpus",
    "up.rollout_gpus",
)
"""Keys that may ask for GPUs."""


def run_doctor(
    target: Path | None,
    overrides: list[str],
    *,
    plays_episode: bool = False,
    compares_logprobs: bool = False,
    reads_values: bool = False,
    steps: int | None = None,
    in_json: bool = False,
) -> int:
    """Examine this host and `target` as `examine` does, and print the findings, with `in_json` as JSON.

    Return 0 if a run can work, 2 if it does not fit this host, 1 for other errors, or the code of a signal.
    """
    console = Console(markup=False, highlight=False)
    findings: list[Finding] = []
    signal_code = 0
    try:
        for finding in examine(
            target,
            overrides,
            plays_episode=plays_episode,
            compares_logprobs=compares_logprobs,
            reads_values=reads_values,
            steps=steps,
        ):
            findings.append(finding)
            if not in_json:
                print_finding(console, finding)
    except SystemExit as stop:
        # A signal ended it. The findings so far are printed.
        signal_code = int(stop.code or 1)
    if in_json:
        sys.stdout.write(json.dumps(as_json(findings)) + "\n")
    else:
        console.print(summary(findings))
    if signal_code:
        return signal_code
    is_unfit = any(finding.subject in _UNFIT and finding.level == "error" for finding in findings)
    return UserError.exit_code if is_unfit else exit_code(findings)


def examine(
    target: Path | None,
    overrides: list[str],
    *,
    plays_episode: bool = False,
    compares_logprobs: bool = False,
    reads_values: bool = False,
    steps: int | None = None,
) -> Iterator[Finding]:
    """Yield findings about this host, and about `target`: a TOML file, run directory or model folder.

    The options add checks at the end: `plays_episode` plays an episode, `reads_values` checks that every
    number of the weights is finite, `compares_logprobs` compares engine and trainer. `steps` is the length of
    the episodes for which memory is planned; None means what the tasks allow.
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
    checks = _host_checks(config)
    if config is not None:
        checks |= _model_checks(config) if of_model else _run_checks(config, steps)
        more = {
            "episode": (plays_episode, _play),
            "values": (reads_values, run.values),
            "parity": (compares_logprobs, _compare),
        }
        checks |= {
            name: partial(check, config)
            for name, (is_requested, check) in more.items()
            if is_requested
        }
    lacks_gpus, errors = False, list[str]()
    for subject, check in checks.items():
        for finding in run_check(subject, check):
            if lacks_gpus and finding.subject in _GPU_KEYS and NO_GPU in finding.text:
                # The error about the GPUs names this key already.
                continue
            if subject in _LOADING and any(finding.text in text for text in errors):
                continue
            errors += [finding.text] if finding.level == "error" else []
            lacks_gpus |= finding.subject == "gpu" and finding.level == "error"
            yield finding


def _host_checks(config: Config | None) -> dict[str, Check]:
    """Return the checks of this host by subject; `config` adds what its run needs."""
    suite, vllm = None, config is not None and config.rollout.engine == "vllm"
    # A guest that is reached by its URL has its programs elsewhere.
    if config is not None and "url" not in config.env.options:
        suite = config.env.suite
    return {
        "python": machine.python,
        "packages": machine.packages,
        "gpu": partial(machine.gpus, "" if config is None else _keys_asking_for_gpus(config)),
        **({"vllm": vllm_parts} if vllm else {}),
        "programs": partial(machine.programs, suite),
        "guests": guests.guests,
        "memory": machine.memory,
        "shared memory": machine.shared_memory,
        "open files": machine.open_files,
    }


def _model_checks(config: Config) -> dict[str, Check]:
    """Return the checks of a model folder alone by subject."""
    return {
        "model": partial(run.model_folder_alone, config),
        "family": partial(run.family, config, of_model=True),
    }


def _run_checks(config: Config, steps: int | None) -> dict[str, Check]:
    """Return the checks of a run's configuration by subject."""
    return {
        "config": partial(run.configuration, config),
        "run directory": partial(run.directory, config),
        "ports": partial(run.ports, config),
        "model": partial(run.model, config),
        "family": partial(run.family, config),
        "teacher": partial(run.teacher, config),
        "train.lr": partial(run.learning_rate, config),
        "plan": partial(plan, config, steps),
        "compute modes": partial(machine.compute_modes, config),
        "slots": partial(machine.env_limits, config),
        "tasks": partial(run.tasks, config),
    }


def _config(target: Path, overrides: list[str], *, of_model: bool) -> Config:
    """Return the configuration of a TOML file, run directory or model folder. Raises DartError."""
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


def _keys_asking_for_gpus(config: Config) -> str:
    """Return the keys that ask for GPUs with their values, as text."""
    values = {key: value_of(config, key) for key in _GPU_KEYS}
    without = ("auto", "cpu", "file", "gloo")
    asking = {key: value for key, value in values.items() if value and value not in without}
    return ", ".join(f"{key} = {to_toml(value)}" for key, value in asking.items())


def _play(config: Config) -> Iterator[Finding]:
    """Play one episode, and yield findings about it."""
    from dart_cli.doctor.trial_episode import play  # late: loads the engine's parts

    yield from play(config)


def _compare(config: Config) -> Iterator[Finding]:
    """Compare engine and trainer, and yield findings about their log-probabilities."""
    from dart_cli.doctor.logprob_check import check_logprobs  # late: loads the model

    yield from check_logprobs(config)
