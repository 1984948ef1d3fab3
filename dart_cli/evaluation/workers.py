"""An evaluation by several processes beside this one.

    play_by_workers  starts them, and ends them together
    refuse_workers   the error where there are no GPUs for so many

Each is a `dart eval worker`: a model and environments of its own, like `dart rollout` and `dart env` in
one process, which claims episodes of the evaluation's file. Rollout workers of a run would not do: they
take each newer version while they serve, and serve only beside `dart data`; here the weights are those
that the evaluation has chosen, also while the run goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence

from bus.errors import ConfigError
from dart_cli.config.devices import gpus_of, gpus_per_worker
from dart_cli.config.schema import Config
from dart_cli.evaluation.episodes import EpisodeStore
from dart_cli.runtime.liveness import workers_of
from dart_cli.runtime.logs import log_dir
from dart_cli.runtime.supervisor import RESTARTS, Supervisor

LOOK_S = 0.5
"""How often the bar is moved."""


def refuse_workers(config: Config, workers: int) -> None:
    """Raise ConfigError where [up] names GPUs, and not enough for so many workers."""
    if workers and config.up.rollout_gpus:
        have = len(config.up.rollout_gpus) // gpus_per_worker(config)
        if workers > have:
            raise ConfigError(
                f"--workers {workers}: up.rollout_gpus = {config.up.rollout_gpus} has GPUs for {have}; name more of "
                f"them, or --workers {have}"
            )
        for index in range(workers):
            gpus_of(config, "rollout", f"rollout-{index}")


async def play_by_workers(
    config: Config,
    arguments: Sequence[str],
    store: EpisodeStore,
    workers: int,
    look: Callable[[], None],
    refuse: Callable[[], None],
) -> None:
    """Play what is left by so many processes. `look` moves the bar; `refuse` may raise while they play.

    Raises ChildError where one of them cannot be kept alive.
    """
    counts = store.counts()
    if counts.over == counts.total:
        refuse()
        return
    _tell_live(config)
    names = [f"eval-{index}" for index in range(workers)]
    supervisor = Supervisor(
        {
            name: ["eval", "worker", *arguments, "--name", store.folder.name, "--worker", name]
            for name in names
        },
        leaders=names,
        restarts=RESTARTS,
        log_file=log_dir(config.run.dir) / "eval-workers.log",
        notice=lambda line: None if "progress:" in line else _say(line),
    )
    stop = asyncio.Event()
    running = asyncio.create_task(supervisor.run(stop))
    try:
        while not running.done():
            await asyncio.wait([running], timeout=LOOK_S)
            store.release_dead()
            look()
            refuse()
    finally:
        stop.set()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    refuse()


def _tell_live(config: Config) -> None:
    """Say that a run goes on meanwhile, on the same GPUs."""
    live = [
        each.name
        for each in workers_of(config.run.dir)
        if each.name.startswith("rollout-") and each.liveness not in ("gone", "")
    ]
    if live:
        _say(
            f"the run is live ({', '.join(live)}): these weights are evaluated whatever it publishes; its rollout "
            "workers and these share the GPUs"
        )


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
