"""`dart train`: the process around the trainer.

run          connects the parts, loads torch and the trainer (loop.py), runs the trainer to its end
_listen      reads RunState from the data service: the end of the run, and which processes are absent
announced_waits   logs what the process waits for, from its start on, since importing torch takes seconds
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bus.endpoints import DATA, TELEMETRY_IN, TELEMETRY_OUT, TRAIN
from bus.heartbeat import awaited
from bus.messages import Role, RunState
from bus.pubsub import Publisher, Subscriber
from bus.requests import Replier, Requester
from dart_cli.config.endpoints import run_curve, run_endpoints
from dart_cli.config.schema import Config
from dart_cli.runtime.background import StopRequested, background, in_daemon_thread, unless_stopped
from dart_cli.runtime.joining import Joining
from dart_cli.runtime.waits import announced_waits, data_awaited

if TYPE_CHECKING:
    from dart_cli.train.loop import Trainer

log = logging.getLogger(__name__)

WORKER = "train"
MOST_WORKERS = 1024
"""Most requests of rollout workers for weights that wait for an answer at once."""


@dataclass
class _Others:
    """The state of the other processes of the run, for reports of waits."""

    absent: list[Role] = field(default_factory=list)
    trainer: Trainer | None = None  # None until it is loaded

    def awaited(self) -> str:
        """Return the text about the absent processes without which no batch can come.

        Return an empty string unless the trainer waits for a batch.
        """
        if self.trainer is None or not self.trainer.is_waiting:
            return ""
        missing = [role for role in self.absent if role != "train"]
        return awaited(*missing) if missing else ""


async def run(config: Config, stop: asyncio.Event) -> None:
    """Train to the last of `train.updates`, until the data service ends the run, or until `stop` is set.

    A last checkpoint is written at the end. Raises ConfigError, ModelError, CheckpointError,
    WeightsError, LogprobCheckError, and the errors that the data service answers with.
    """
    endpoints, curve = run_endpoints(config), run_curve(config)
    others = _Others()
    async with contextlib.AsyncExitStack() as stack:
        data = await stack.enter_async_context(
            Requester(endpoints.address(DATA), name=WORKER, peer="dart data", curve=curve)
        )
        publisher = await stack.enter_async_context(
            Publisher(endpoints.address(TELEMETRY_IN), curve=curve)
        )
        states = await stack.enter_async_context(
            Subscriber(endpoints.address(TELEMETRY_OUT), [RunState], curve=curve)
        )
        await stack.enter_async_context(
            announced_waits(lambda: others.awaited() if data.connected else data_awaited(config))
        )
        joining = Joining(config, "train", WORKER, data)
        await stack.enter_async_context(background(_listen(states, others, stop), joining.keep()))
        try:
            await unless_stopped(stop, in_daemon_thread(_import_all))
        except StopRequested:
            return
        import torch

        from dart_cli.train.loop import Trainer
        from dart_cli.train.metric_writer import check_wandb
        from dart_cli.weights.broadcast.channel import BroadcastChannel

        check_wandb(config)
        torch_thread = ThreadPoolExecutor(
            1, "torch", torch.set_num_threads, (config.train.threads,)
        )
        stack.callback(torch_thread.shutdown)
        trainer = others.trainer = Trainer(
            config, data, publisher, stop, torch_thread, joining.joined
        )
        await stack.enter_async_context(trainer.heartbeat)
        if isinstance(trainer.channel, BroadcastChannel):
            replier = await stack.enter_async_context(
                Replier(endpoints.address(TRAIN), curve=curve, max_handlers=MOST_WORKERS)
            )
            await stack.enter_async_context(background(replier.serve(trainer.channel.answer)))
        await trainer.run()


def _import_all() -> None:
    """Import what `run` needs. It runs in a thread, so that the process receives and reports meanwhile."""
    import dart_cli.train.loop  # noqa: F401 - it imports torch and everything else


async def _listen(states: Subscriber, others: _Others, stop: asyncio.Event) -> None:
    """Record which processes are absent; set `stop` when the data service announces the end of the run."""
    async for state in states:
        assert isinstance(state, RunState)
        others.absent = state.absent
        if state.stopping and not stop.is_set():
            log.info("the run is over: %s", state.reason)
            stop.set()
