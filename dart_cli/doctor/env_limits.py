"""Whether this host lets a run's environment slots have the threads, processes and files they need.

    Limits          what one process, and all of a user's or a container's, may have
    limits          those of this host
    env_limits      the doctor's finding
    refuse_slots    raises where the slots cannot be, for `--dry-run`
    excess          what they would exceed, and the cure (pure)

A slot in a thread is one thread (512 slots: 516 threads, 34 open files, 0.1 MB each); a slot in a process of
its own is that process with two threads, and four files of the one that plays it. What a suite starts for
itself, a browser or a display, comes on top of it.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bus.errors import ConfigError
from dart_cli.config.schema import Config
from dart_cli.doctor.findings import Finding, error, ok

FILES_OF_A_PROCESS = 64
THREADS_OF_A_PROCESS = 16
THREADS_OF_A_CHILD = 3
FILES_OF_A_CHILD = 4


@dataclass(frozen=True)
class Limits:
    """None for no limit."""

    files: int | None  # of one process
    threads: int | None  # of all processes of this user, or of the container


def limits() -> Limits:
    """What `ulimit` and the control group allow here."""
    of_user = None if os.geteuid() == 0 else _soft(resource.RLIMIT_NPROC)  # root has none
    threads = [of_user, _of_group()]
    return Limits(_soft(resource.RLIMIT_NOFILE), min(filter(None, threads), default=None))


def env_limits(config: Config) -> Iterator[Finding]:
    """Of all `dart env` processes that `dart up` starts here."""
    here = limits()
    problem = excess(config, max(1, config.up.envs), here)
    if problem is None:
        yield ok("slots", f"{max(1, config.up.envs)} x {config.env.slots} fit this host's limits")
    else:
        yield error("slots", *problem)


def refuse_slots(config: Config, *, envs: int) -> None:
    """Raise ConfigError where `envs` processes of this configuration would exceed a limit."""
    if (problem := excess(config, envs, limits())) is not None:
        raise ConfigError("; ".join(problem))


def excess(config: Config, envs: int, here: Limits) -> tuple[str, str] | None:
    """(what does not fit, the cure) of so many `dart env` processes; None if all fits."""
    slots = config.env.slots
    in_processes = config.env.isolation == "process"
    threads_each = THREADS_OF_A_CHILD if in_processes else 1
    files_each = FILES_OF_A_CHILD if in_processes else 0
    files = FILES_OF_A_PROCESS + files_each * slots
    threads = envs * (THREADS_OF_A_PROCESS + threads_each * slots)
    if here.files is not None and files > here.files:
        fit = (here.files - FILES_OF_A_PROCESS) // max(1, files_each)
        return (
            f"env.slots = {slots} needs {files} open files in a process, at most {here.files} are allowed",
            f"run `ulimit -n {files}` first, or set env.slots = {max(1, fit)}",
        )
    if here.threads is not None and threads > here.threads:
        fit = (here.threads // envs - THREADS_OF_A_PROCESS) // threads_each
        cure = (
            f"set env.slots = {max(1, fit)} and play the others on another host, or raise `ulimit -u` "
            "and the container's pids limit"
        )
        return (
            f"{envs} x env.slots = {slots} needs {threads} threads, at most {here.threads} are allowed here",
            cure,
        )
    return None


def _soft(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _of_group() -> int | None:
    """Most threads of the control group; None without a limit."""
    try:
        return int(Path("/sys/fs/cgroup/pids.max").read_text(encoding="ascii"))
    except (OSError, ValueError):  # version 1 of control groups, or "max"
        return None
