"""The connections of a process that plays: to the data service, to rollout workers, and to the telemetry.

    Peers       the connections, and the messages that arrive over them
    connected   opens the connections for a block

`dart env` and `dart serve` use this module.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from bus.endpoints import DATA, TELEMETRY_IN, TELEMETRY_OUT
from bus.heartbeat import HeartbeatSender, Load
from bus.messages import Heartbeat, Message, RunState
from bus.pubsub import Publisher, Subscriber
from bus.requests import Requester
from dart_cli.config import endpoints as limits
from dart_cli.config.endpoints import run_curve, run_endpoints
from dart_cli.config.schema import Config
from dart_cli.env.data_client import DataClient
from dart_cli.env.router import RolloutRouter
from dart_cli.runtime.background import background
from dart_cli.runtime.joining import Joining
from dart_cli.runtime.waits import announced_waits, data_awaited, receive_telemetry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Peers:
    """The connections of a process that plays."""

    heartbeat: HeartbeatSender  # of this process; it sends while it is entered
    data_service: DataClient
    router: RolloutRouter
    telemetry: AsyncIterator[Message]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """This event is set when the data service reports that the run is over."""

    async def listen(self) -> None:
        """Read telemetry until cancelled: pass heartbeats to the router; set `over` at the end of the run."""
        async for message in self.telemetry:
            if isinstance(message, Heartbeat):
                self.router.observe(message)
            elif isinstance(message, RunState) and message.stopping:
                logger.info("the run is over: %s", message.reason)
                self.over.set()


@asynccontextmanager
async def connected(
    config: Config,
    worker: str,
    role: Literal["env", "serve"],
    load: Callable[[], Load],
    *,
    endpoint: str = "",
) -> AsyncIterator[Peers]:
    """Yield the connections of `worker`. Its heartbeat reports `load()`, and its `endpoint` if it has one.

    Raises UserError if the data service refuses the settings of this process.
    """
    endpoints, curve = run_endpoints(config), run_curve(config)
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(
            Publisher(endpoints.address(TELEMETRY_IN), curve=curve)
        )
        subscriber = await stack.enter_async_context(
            Subscriber(endpoints.address(TELEMETRY_OUT), [Heartbeat, RunState], curve=curve)
        )
        requester, leases = [
            await stack.enter_async_context(
                Requester(endpoints.address(DATA), name=worker, peer="dart data", curve=curve)
            )
            for _ in range(2)
        ]
        heartbeat = HeartbeatSender(publisher, role, worker, load, endpoint=endpoint)
        router = RolloutRouter(
            worker,
            config.rollout.deadline_s,
            curve=curve,
            max_staleness=config.data.max_staleness,
            waits=heartbeat,
        )
        stack.push_async_callback(router.close)
        joining = Joining(config, role, worker, requester)
        data_service = DataClient(requester, leases, limits.DEADLINE_S, heartbeat, joining.joined)
        stack.callback(data_service.close)

        def awaited() -> str:
            if not requester.connected:
                return data_awaited(config)
            return "" if router.ready() else router.missing()

        await stack.enter_async_context(announced_waits(awaited))
        await stack.enter_async_context(background(joining.keep()))
        telemetry = receive_telemetry(subscriber, config, lambda: requester.connected)
        yield Peers(heartbeat, data_service, router, telemetry)
