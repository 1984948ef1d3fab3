"""Runs all processes of a run, from one command: `dart up`.

    run_up         evaluates, trains, evaluates and reports; what an earlier start finished is not done again
    refuse_second  raises the error where a process of the run lives already
    set_aside      renames an older run directory, so that the run begins anew (`--fresh`)
    finished_by    which limit of the run an earlier start reached, in words

The processes are children (runtime/supervisor.py), started by the same commands that a user would type, on
this host or on the nodes of a Ray cluster (cluster/). `RUN/logs/up.log` has the output of all of them;
live_display.py shows the progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bus.endpoints import make_private_dir
from bus.errors import AttentionError, RunDirectoryError, StoreError
from dart_cli.cli.live_display import LiveDisplay
from dart_cli.cli.options import refuse_other
from dart_cli.config.endpoints import weights_dir
from dart_cli.config.schema import Config
from dart_cli.config.task_split import untrained_tasks
from dart_cli.data.run_end import learned_line
from dart_cli.data.store.open import DATABASE, open_reader
from dart_cli.doctor.plan_findings import refuse_full
from dart_cli.evaluation.results import AFTER, BEFORE, Evaluation, read_evaluation
from dart_cli.inspection.final_report import write_report
from dart_cli.runtime.commands import commands_of
from dart_cli.runtime.liveness import workers_of
from dart_cli.runtime.logs import ignore_dumps, log_dir, logging_to, stacks_to
from dart_cli.runtime.role import end_with_parent, stop_signals
from dart_cli.runtime.run_dir import claim, leave_signal, refuse_live, save_config
from dart_cli.runtime.streams import keep_going
from dart_cli.runtime.supervisor import (
    RESTARTS,
    ChildError,
    Progress,
    StartProcess,
    Supervisor,
    start_here,
)
from dart_cli.train.checkpoints.identity import newest_updates

if TYPE_CHECKING:
    from dart_cli.cluster.connection import Cluster

logger = logging.getLogger(__name__)


INTERRUPTED = 130
_WEIGHT_SET = "v[0-9]*/manifest.json"  # matches the versions in a folder of weight sets


@dataclass(frozen=True)
class _Launch:
    """How the processes of the run are started: with which command lines, and on which hosts."""

    config: Config
    arguments: Sequence[str]
    start: StartProcess
    kill: Callable[[], None]  # kills the remaining processes at once


def run_up(
    config: Config,
    config_path: Path,
    overrides: Sequence[str],
    *,
    fresh: bool,
    force: bool = False,
    ray: str = "",
) -> int:
    """Bring the run to its end, and return the exit code: 0, or 130 if a signal stopped it.

    With `ray`, it runs on the cluster at that address, which `refuse_ray` accepts; UserError is raised where
    there is none.

    Raises RunDirectoryError if the run is live already, and ConfigError or ModelError if it cannot continue
    with this configuration or its disk is too full. Raises ChildError if one of its processes could not be
    kept alive, or, after the report, if the run was ended for train.attention_minutes.
    """
    began = time.monotonic()
    keep_going()
    end_with_parent()  # the parent may be a benchmark
    if ray:
        from dart_cli.cluster.connection import refuse_unreachable

        refuse_unreachable(ray)  # before an older run is moved
    else:
        refuse_full(config)
    if fresh:
        set_aside(config)
    make_private_dir(config.run.dir)
    ignore_dumps()  # before another process can learn of this one
    with (
        claim(config, "up"),
        logging_to(config.run.dir, "dart-up", terminal=False) as log_file,
        stacks_to(log_file),
    ):
        refuse_second(config)
        refuse_other(config, force=force)
        if force and (config.run.dir / "config.json").exists():
            # The processes compare themselves with the stored configuration.
            save_config(config, force=True)
        arguments = [
            str(config_path),
            *(part for override in overrides for part in ("--set", override)),
        ]
        unattended: ChildError | None = None
        with _cluster(config, ray) as cluster:
            try:
                finished = asyncio.run(_bring_to_end(config, config_path, overrides, cluster))
            except ChildError as error:
                if error.exit_code != AttentionError.exit_code:
                    raise
                unattended, finished = error, True
    if not finished:
        on_ray = ["--ray", ray] if ray else []
        sys.stderr.write(f"stopped; go on with: dart up {shlex.join([*arguments, *on_ray])}\n")
        return INTERRUPTED
    minutes_total = (time.monotonic() - began) / 60
    write_report(config, minutes_total=minutes_total, ended_by=str(unattended or ""))
    if unattended is not None:  # no evaluation is played where something is broken
        raise unattended
    return 0


def refuse_second(config: Config) -> None:
    """Raise RunDirectoryError if the run has a live data service or trainer, which was started by hand."""
    for worker in workers_of(config.run.dir):
        # The lock decides. A lock that is certainly free is not taken, since our pid would be written to it.
        if worker.name in ("data", "train") and worker.liveness != "gone":
            with claim(config, worker.name, worker.name):
                pass


def set_aside(config: Config) -> None:
    """Move an older run directory, and its weights if they are elsewhere, to the first free DIR.1, DIR.2, ...

    Raises RunDirectoryError if a process of that run still lives, or if a folder is no run directory.
    """
    run_dir, weights = config.run.dir, weights_dir(config)
    if not _is_run(run_dir):
        raise RunDirectoryError(
            f"{run_dir} is no run directory, it has neither {DATABASE} nor workers/, and is not "
            "moved aside: set another run.dir"
        )
    inside = weights.is_relative_to(run_dir)
    if not (inside or _is_run(weights) or any(weights.glob(_WEIGHT_SET))):
        raise RunDirectoryError(
            f"{weights} holds no weight sets and is not moved aside: set another weights.directory"
        )
    for folder in (run_dir, weights):
        if not folder.exists():
            continue
        if folder == run_dir:
            refuse_live(folder)
        number = 1
        while (target := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(target)
        sys.stderr.write(f"moved {folder} to {target}\n")


def _is_run(folder: Path) -> bool:
    """Return True for a run directory (an evaluation in it is enough), and for an empty or missing folder."""
    if not folder.exists():
        return True
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    return bool(names & {DATABASE, "workers"}) or names <= {"eval", "logs"}


@contextlib.contextmanager
def _cluster(config: Config, address: str) -> Iterator[Cluster | None]:
    """Yield the Ray cluster at `address`; None without one.

    Enter it before the event loop, since Ray replaces the handler of SIGTERM.
    """
    if not address:
        yield None
        return
    from dart_cli.cluster.connection import connected
    from dart_cli.cluster.demands import demands_of

    with connected(address, cpus=sum(demand.cpus for demand in demands_of(config, []))) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def _launch(
    config: Config,
    path: Path,
    overrides: Sequence[str],
    cluster: Cluster | None,
    notice: Callable[[str], None],
    stop: asyncio.Event,
) -> AsyncIterator[_Launch]:
    """Yield how processes are started: on this host, or on the nodes of the cluster if there is one."""
    if cluster is None:
        arguments = [str(path), *(part for override in overrides for part in ("--set", override))]
        yield _Launch(config, arguments, start_here, lambda: None)
        return
    from dart_cli.cluster.cluster_run import run_on_cluster

    async with run_on_cluster(cluster, config, path, overrides, notice=notice, stop=stop) as run:
        yield _Launch(run.config, run.arguments, run.start, run.kill)


async def _bring_to_end(
    config: Config, path: Path, overrides: Sequence[str], cluster: Cluster | None
) -> bool:
    """Evaluate, train and evaluate again. Return False if a signal stopped the run."""
    stop = asyncio.Event()
    display = LiveDisplay()
    killable: list[Supervisor | _Launch] = []

    def on_signal(what: str) -> None:
        if stop.is_set():
            try:
                for running in killable:
                    running.kill()
                display.leave()
            finally:
                os._exit(INTERRUPTED)
        stop.set()  # before anything is printed: the same Ctrl-C may have ended the reader
        display.notice("stopping; a second Ctrl-C stops at once")
        logger.info("dart up was asked to end by %s", what)

    loop = asyncio.get_running_loop()
    for number, what in stop_signals().items():
        loop.add_signal_handler(number, on_signal, what)

    checkpoints = Progress("checkpoint", lambda: newest_updates(config.run.dir / "checkpoints"))

    async def run(
        commands: Mapping[str, Sequence[str]], leaders: Sequence[str], restarts: int
    ) -> None:
        supervisor = Supervisor(
            commands,
            leaders=leaders,
            restarts=restarts,
            log_file=log_dir(config.run.dir) / "up.log",
            notice=display.notice,
            start=launch.start,
            progress={"train": checkpoints},
            on_kill=partial(leave_signal, config.run.dir),
            is_over=lambda: display.is_over,
        )
        killable.append(supervisor)
        await supervisor.run(stop)

    async def evaluate(name: str, *options: str) -> None:
        display.notice(f"evaluating {name} the run: {_episodes_text(config)}, sampled and greedy")
        command = ["eval", *launch.arguments, "--json", "--keep-as", name, *options]
        await run({"eval": command}, ["eval"], 0)

    async with (
        display.live_page(),
        _launch(config, path, overrides, cluster, display.notice, stop) as launch,
    ):
        killable.append(launch)
        around = config.eval.around
        if around and _valid_evaluation(config, BEFORE) is None and not stop.is_set():
            await evaluate(BEFORE, "--model", config.model.path, "--mode", "all")
        if reached := finished_by(config):
            display.notice(f"{reached}; --fresh begins anew")
        elif not stop.is_set():
            async with display.watching(launch.config):
                commands = commands_of(config, launch.arguments)
                await run(commands, ["data", "train"], RESTARTS)
            if line := _stop_at_line(config):
                display.notice(line)
        if around and not stop.is_set() and _is_outdated(config):
            await evaluate(AFTER)
    return not stop.is_set()


def _episodes_text(config: Config) -> str:
    """Return what one mode of an evaluation plays, in words."""
    number = config.eval.episodes
    also = f" and {number} of tasks never trained on" if untrained_tasks(config) else ""
    return f"{number} episodes on fresh seeds of the trained tasks{also}"


def finished_by(config: Config) -> str:
    """Return which limit of the run an earlier start reached, in words; empty if it reached none."""
    train = config.train
    if line := _stop_at_line(config):
        return f"{line}; train.stop_at = 0 goes on"
    try:
        with open_reader(config.run.dir) as reader:
            trained = sum(batch.state == "trained" for batch in reader.batches())
            over = reader.trajectories_over()
    except RunDirectoryError:  # there is no run yet; the data service reports any other error
        return ""
    if trained >= train.updates:
        return f"all {train.updates} updates are done"
    if 0 < train.max_trajectories <= over:
        return f"all {train.max_trajectories} trajectories were played"
    return ""


def _stop_at_line(config: Config) -> str:
    """Return a line about the run if train.stop_at has ended it; empty if not."""
    try:
        with open_reader(config.run.dir) as reader:
            line = learned_line(reader.run().learned, config.train)
            trained = sum(batch.state == "trained" for batch in reader.batches())
            return f"{line} after {trained} of {config.train.updates} updates" if line else ""
    except (RunDirectoryError, StoreError):
        return ""  # there is no run yet; the data service reports any other error


def _is_outdated(config: Config) -> bool:
    """Return True if the evaluation after the run is missing, or evaluated other weights than the newest."""
    evaluation = _valid_evaluation(config, AFTER)
    if evaluation is None:
        return True
    with open_reader(config.run.dir) as reader:
        newest = reader.newest_version()
    version = -1 if newest is None else newest.policy_version
    return evaluation.policy_version != version


def _valid_evaluation(config: Config, name: str) -> Evaluation | None:
    """Return the evaluation called `name`; None if there is none, or if it has no valid episode."""
    evaluation = read_evaluation(config.run.dir, name)
    return evaluation if evaluation is not None and evaluation.judged else None
