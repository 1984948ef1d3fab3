"""`dart serve`: agents of other programs play; their episodes are leased, stored and trained on.

    run             the process: connections, heartbeat and endpoint, until it is stopped or the run is over
    token_for       returns the token that requests need
    say_address     prints the address of the endpoint
    Sessions        the open episodes                                   (sessions.py)
    DataClient      requests to the data service: leases, steps, ends   (dart_cli/env/data_client.py)
    RolloutRouter   requests to rollout workers                         (dart_cli/env/router.py)
    connected       the connections, and the messages that arrive       (dart_cli/env/peers.py)

The process does not end if another one is absent: a request waits up to its limit, and is then answered with
503 and the name of what is missing.
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
"""Environment variable with the token. If it is not set and a token is needed, a random one is printed."""
LEAST_TOKEN = 16  # characters
STOPPED = "dart serve was stopped"
SPARE = 32
"""Requests at once beyond one for each session, for those that open, list and end sessions."""


async def run(config: Config, worker: str, stop: asyncio.Event, *, guarded: bool = False) -> None:
    """Serve until `stop` is set or the data service reports that the run is over; then return the leases.

    With `guarded`, requests from loopback need the token as well. Raises UserError if the address cannot be
    used.
    """
    serve = config.serve
    token = token_for(serve.host, guarded=guarded)

    def load() -> Load:
        return sessions.load()

    with closing(listen(serve.host, serve.port, 0, ("serve.host", "serve.port"))) as listener:
        endpoint = address(serve.host, listener.getsockname()[1]) + "v1"
        async with connected(config, worker, "serve", load, endpoint=endpoint) as peers:
            heartbeat = peers.heartbeat
            run_peers = RunPeers(worker, peers.data_service, peers.router, heartbeat)
            sessions = Sessions(
                config, peers.router, run_peers, action_language=action_language(config)
            )
            app = make_app(sessions, host=serve.host, token=token)
            server = make_server(app, serve.sessions + SPARE, signals=False)
            async with heartbeat:
                say_address(worker, endpoint, token)
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
                    stop.set()  # the time that the process may take to end begins here
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
    """Return the token that requests need; "" if they need none.

    Raises UserError if the user's token is too short, or is not printable ASCII.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token and (len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable()):
        raise UserError(
            f"{TOKEN_VARIABLE} must have {LEAST_TOKEN} printable ASCII characters at least; unset it, and "
            "dart makes a token"
        )
    if token or guarded or not is_loopback(host):
        return token or secrets.token_urlsafe(24)
    return ""


def say_address(name: str, there: str, token: str) -> None:
    """Print the address `there` where `name` is served, and the token unless the user set it."""
    key = f", API key {token}" if token else ""
    if token and os.environ.get(TOKEN_VARIABLE):
        key = f", API key from {TOKEN_VARIABLE}"
    sys.stderr.write(f"{name}: {there}{key}\n")
    sys.stderr.flush()
