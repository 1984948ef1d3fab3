"""`dart serve`: agents of other programs play; their episodes are leased, filed and trained on.

    run             the process: connections, heartbeat, endpoint; until stopped or the run is over
    Sessions        the open episodes                                   (sessions.py)
    DataClient      requests to data: leases, steps, ends               (dart_cli/env/data_client.py)
    RolloutRouter   requests to rollout workers                         (dart_cli/env/router.py)
    connected       its connections, and what comes over them           (dart_cli/env/peers.py)

Nothing ends because another process is absent: requests wait as long as they may, and are then answered with
503 and what is missing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from contextlib import closing

from bus.endpoints import is_loopback
from bus.errors import UserError
from bus.heartbeat import Load
from dart_cli.config.schema import Config
from dart_cli.env.peers import connected
from dart_cli.runtime.http_server import address, listen, make_server
from dart_cli.serve.app import make_app
from dart_cli.serve.sessions import RunPeers, Sessions, action_language

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "DART_SERVE_TOKEN"
"""Environment variable with the token; without it one is drawn where one is needed, and printed."""
LEAST_TOKEN = 16
STOPPED = "dart serve was stopped"
SPARE = 32
"""Requests beyond one for each session: those that open, list and end some."""


async def run(config: Config, worker: str, stop: asyncio.Event, *, guarded: bool = False) -> None:
    """Serve until `stop` is set or data says that the run is over; then return the leases.

    With `guarded` loopback needs the token, too. Raises UserError where the address cannot be served on.
    """
    serve = config.serve
    token = token_for(serve.host, guarded=guarded)

    def load() -> Load:
        return sessions.load()

    with closing(listen(serve.host, serve.port, 0, ("serve.host", "serve.port"))) as listener:
        there = address(serve.host, listener.getsockname()[1]) + "v1"
        async with connected(config, worker, "serve", load, endpoint=there) as peers:
            heartbeat = peers.heartbeat
            run_peers = RunPeers(worker, peers.data, peers.router, heartbeat)
            sessions = Sessions(
                config, peers.router, run_peers, action_language=action_language(config)
            )
            app = make_app(sessions, host=serve.host, token=token)
            server = make_server(app, serve.sessions + SPARE, signals=False)
            async with heartbeat:
                say_address(worker, there, token)
                serving = asyncio.create_task(server.serve(sockets=[listener]), name="server")
                tasks = [
                    asyncio.create_task(peers.listen(), name="telemetry"),
                    asyncio.create_task(sessions.watch(), name="watch"),
                ]
                ends = [asyncio.create_task(event.wait()) for event in (stop, peers.over)]
                try:
                    await asyncio.wait(
                        [serving, *tasks, *ends], return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    stop.set()  # from now on the time to end runs
                    why = "the run is over" if peers.over.is_set() else STOPPED
                    await sessions.give_back(why)
                    heartbeat.beat()
                    server.should_exit = True
                    for task in (*tasks, *ends):
                        task.cancel()
                    results = await asyncio.gather(serving, *tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


def token_for(host: str, *, guarded: bool) -> str:
    """Return the token that requests need; empty where they need none. Raises UserError for a short one."""
    given = os.environ.get(TOKEN_VARIABLE, "")
    if given and (len(given) < LEAST_TOKEN or not given.isascii() or not given.isprintable()):
        raise UserError(
            f"{TOKEN_VARIABLE} must have {LEAST_TOKEN} printable ASCII characters at least; unset it, and "
            "one is drawn"
        )
    if given or guarded or not is_loopback(host):
        return given or secrets.token_urlsafe(24)
    return ""


def say_address(name: str, there: str, token: str) -> None:
    """Print where `name` is served, and the token that requests need unless the user chose it."""
    key = f", API key {token}" if token else ""
    if token and os.environ.get(TOKEN_VARIABLE):
        key = f", API key from {TOKEN_VARIABLE}"
    sys.stderr.write(f"{name}: {there}{key}\n")
    sys.stderr.flush()
