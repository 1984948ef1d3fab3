"""The telemetry that the data process publishes, with a warning in the log when it falls silent.

receive_telemetry  the messages of a subscriber, without end
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from bus.endpoints import DATA
from bus.messages import Message
from bus.pubsub import Subscriber
from dart_cli.config import endpoints
from dart_cli.config.endpoints import run_endpoints
from dart_cli.config.schema import Config

log = logging.getLogger(__name__)

LISTEN_S = 1.0
"""Longest wait for one message, of which silence is the sum."""
AGAIN_S = 600.0
"""Seconds from one warning of a silence to the next."""


async def receive_telemetry(
    subscriber: Subscriber, config: Config, is_there: Callable[[], bool]
) -> AsyncIterator[Message]:
    """The messages of `subscriber`, without end.

    A warning if none arrived within DEADLINE_S though data `is_there`: else it is awaited, which
    told_waits says.
    """
    first_s = endpoints.DEADLINE_S
    silent_s, warn_at_s = 0.0, first_s
    while True:
        slice_s = min(LISTEN_S, warn_at_s - silent_s)
        try:
            # Not asyncio.wait_for: until Python 3.12 it may swallow a cancellation.
            async with asyncio.timeout(slice_s):
                message = await subscriber.next()
        except TimeoutError:
            # Where this process was stopped (SIGSTOP), it is data's silence no longer than a slice.
            silent_s += slice_s
            if silent_s < warn_at_s:
                continue
            warn_at_s = silent_s + max(AGAIN_S, first_s)
            if is_there():
                log.warning(
                    "has heard nothing from dart data at %s for %g s, which is connected; see its log",
                    *(run_endpoints(config).address(DATA), silent_s),
                )
        else:
            silent_s, warn_at_s = 0.0, first_s
            yield message
