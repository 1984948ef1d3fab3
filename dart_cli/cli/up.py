"""The whole run from one command: the `dart up` verb.

    run_up         evaluate, train, evaluate, report; what an earlier start did is not done again
    refuse_second  the error where a process of the run lives already
    set_aside      moves an older run directory out of the way (`--fresh`)
    finished_by    the bound of the run that an earlier start reached

The processes are children (runtime/supervisor.py), started by the same commands that a person would
type, here or on the nodes of a Ray cluster (cluster/); `RUN/logs/up.log` holds what all of them print,
live_display.py shows a person how it goes.
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
from dart_cli.config.task_split import composed_tasks
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
_WEIGHT_SET = "v[0-9]*/manifest.json"  # a version in a folder of them


@dataclass(frozen=True)
class _Whereabouts:
    """Where the processes of the run are: their configuration and arguments, and how one is started."""

    config: Config
    arguments: Sequence[str]
    start: StartProcess
    kill: Callable[[], None]  # what is left, at once


def run_up(
    config: Config,
    config_path: Path,
    overrides: Sequence[str],
    *,
    fresh: bool,
    force: bool = False,
    ray: str = "",
) -> int:
    """Run it to its end; returns the exit code, 130 where a signal stopped it.

    With `ray`, on the cluster at that address, which `refuse_ray` accepts. Raises UserError where there is none.

    Raises RunDirectoryError if the run is live already, ConfigError or ModelError if it cannot go on
    with this configuration or has no room on its disk, ChildError if one of its processes could not be kept alive, or,
    after the report, the run was ended for train.attention_minutes.
    """
    began = time.monotonic()
    keep_going()
    end_with_parent()  # where a study started it
    if ray:
        from dart_cli.cluster.connection import refuse_unreachable

        refuse_unreachable(ray)  # before an older run is moved
    else:
        refuse_full(config)
    if fresh:
        set_aside(config)
    make_private_dir(config.run.dir)
    ignore_dumps()  # before another process can know this one
    with (
        claim(config, "up"),
        logging_to(config.run.dir, "dart-up", terminal=False) as log_file,
        stacks_to(log_file),
    ):
        refuse_second(config)
        refuse_other(config, force=force)
        if force and (config.run.dir / "config.json").exists():
            save_config(config, force=True)  # its processes find the run as it is now
        arguments = [str(config_path), *(part for each in overrides for part in ("--set", each))]
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
        say = f"stopped; go on with: dart up {shlex.join([*arguments, *on_ray])}"
        sys.stderr.write(f"{say}\n")
        return INTERRUPTED
    minutes_total = (time.monotonic() - began) / 60
    write_report(config, minutes_total=minutes_total, ended_by=str(unattended or ""))
    if unattended is not None:  # no evaluation is played where something is broken
        raise unattended
    return 0


def refuse_second(config: Config) -> None:
    """Raise RunDirectoryError if the run has a live data or train process, started by hand."""
    for worker in workers_of(config.run.dir):
        # The lock decides. A lock that is surely free is not taken, as our pid would be written to it.
        if worker.name in ("data", "train") and worker.liveness != "gone":
            with claim(config, worker.name, worker.name):
                pass


def set_aside(config: Config) -> None:
    """Move an older run directory (and its weights elsewhere) to the first free DIR.1, DIR.2, ...

    Raises RunDirectoryError if a process of that run still lives, or a folder is not a run's.
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
    """Whether the folder is a run's (an evaluation is enough), or is empty or absent."""
    if not folder.exists():
        return True
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    return bool(names & {DATABASE, "workers"}) or names <= {"eval", "logs"}


@contextlib.contextmanager
def _cluster(config: Config, address: str) -> Iterator[Cluster | None]:
    """Yield the Ray cluster at `address`; None without one. Before the loop: Ray takes over SIGTERM."""
    if not address:
        yield None
        return
    from dart_cli.cluster.connection import connected
    from dart_cli.cluster.demands import demands_of

    with connected(address, cpus=sum(demand.cpus for demand in demands_of(config, []))) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def _whereabouts(
    config: Config,
    path: Path,
    overrides: Sequence[str],
    cluster: Cluster | None,
    notice: Callable[[str], None],
    stop: asyncio.Event,
) -> AsyncIterator[_Whereabouts]:
    """Yield this host, or the nodes of the cluster where there is one."""
    if cluster is None:
        arguments = [str(path), *(part for each in overrides for part in ("--set", each))]
        yield _Whereabouts(config, arguments, start_here, lambda: None)
        return
    from dart_cli.cluster.cluster_run import run_on_cluster

    async with run_on_cluster(cluster, config, path, overrides, notice=notice, stop=stop) as run:
        yield _Whereabouts(run.config, run.arguments, run.start, run.kill)


async def _bring_to_end(
    config: Config, path: Path, overrides: Sequence[str], cluster: Cluster | None
) -> bool:
    """Evaluate, train, evaluate; False if a signal stopped it."""
    stop = asyncio.Event()
    display = LiveDisplay()
    killable: list[Supervisor | _Whereabouts] = []

    def on_signal(what: str) -> None:
        if stop.is_set():
            try:
                for each in killable:
                    each.kill()
                display.leave()
            finally:
                os._exit(INTERRUPTED)
        stop.set()  # before anything is told: the reader may have ended of the same Ctrl-C
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
            start=there.start,
            progress={"train": checkpoints},
            on_kill=partial(leave_signal, config.run.dir),
            is_over=lambda: display.is_over,
        )
        killable.append(supervisor)
        await supervisor.run(stop)

    async def evaluate(name: str, *how: str) -> None:
        display.notice(f"evaluating {name} the run: {_episodes_asked(config)}, sampled and greedy")
        command = ["eval", *there.arguments, "--json", "--keep-as", name, *how]
        await run({"eval": command}, ["eval"], 0)

    async with (
        display.shown(),
        _whereabouts(config, path, overrides, cluster, display.notice, stop) as there,
    ):
        killable.append(there)
        around = config.eval.around
        if around and _judged(config, BEFORE) is None and not stop.is_set():
            await evaluate(BEFORE, "--model", config.model.path, "--mode", "all")
        if reached := finished_by(config):
            display.notice(f"{reached}; --fresh begins anew")
        elif not stop.is_set():
            async with display.watching(there.config):
                commands = commands_of(config, there.arguments)
                await run(commands, ["data", "train"], RESTARTS)
            if line := _learned(config):
                display.notice(line)
        if around and not stop.is_set() and _outdated(config):
            await evaluate(AFTER)
    return not stop.is_set()


def _episodes_asked(config: Config) -> str:
    """Return what one mode of an evaluation plays, in words."""
    composed = bool(composed_tasks(config))
    also = f" and {config.eval.episodes} of compositions" if composed else ""
    return f"{config.eval.episodes} held-out episodes of the tasks{also}"


def finished_by(config: Config) -> str:
    """Return what an earlier start has done: all the updates or trajectories, or it learned; else empty."""
    train = config.train
    if line := _learned(config):
        return f"{line}; train.stop_at = 0 goes on"
    try:
        with open_reader(config.run.dir) as reader:
            trained = sum(batch.state == "trained" for batch in reader.batches())
            over = reader.trajectories_over()
    except RunDirectoryError:  # no run yet; any other mistake is reported by `dart data`
        return ""
    if trained >= train.updates:
        return f"all {train.updates} updates are done"
    if 0 < train.max_trajectories <= over:
        return f"all {train.max_trajectories} trajectories were played"
    return ""


def _learned(config: Config) -> str:
    """Return the line of a run that train.stop_at has ended; empty if it has not."""
    try:
        with open_reader(config.run.dir) as reader:
            line = learned_line(reader.run().learned, config.train)
            trained = sum(batch.state == "trained" for batch in reader.batches())
            return f"{line} after {trained} of {config.train.updates} updates" if line else ""
    except (RunDirectoryError, StoreError):
        return ""  # no run yet; any other mistake is reported by `dart data`


def _outdated(config: Config) -> bool:
    """Whether the evaluation after the run is of other weights than the newest, or missing."""
    evaluation = _judged(config, AFTER)
    if evaluation is None:
        return True
    with open_reader(config.run.dir) as reader:
        newest = reader.newest_version()
    version = -1 if newest is None else newest.policy_version
    return evaluation.policy_version != version


def _judged(config: Config, name: str) -> Evaluation | None:
    """Return the evaluation called `name`; None, too, where it has no valid episode."""
    evaluation = read_evaluation(config.run.dir, name)
    return evaluation if evaluation is not None and evaluation.judged else None
