"""Servers for tests: OpenEnv's real one in a process of its own, and one that says what a test wants."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.server import ServerConnection, serve

from tests.waiting import PATIENCE_S

HERE = Path(__file__).parent
PYTHON = os.environ.get("DART_OPENENV_PYTHON") or str(
    Path(__file__).parents[4] / ".venv-openenv" / "bin" / "python"
)

needs_openenv = pytest.mark.skipif(
    not Path(PYTHON).is_file(), reason="OpenEnv's server is not installed: scripts/setup-openenv"
)


@contextmanager
def real_server(port: int = 0) -> Iterator[str]:
    """The address of OpenEnv's server until the end of the block; see real_server.py for its paths."""
    arguments = [PYTHON, str(HERE / "real_server.py"), *([str(port)] if port else [])]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=HERE) as process:
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


@contextmanager
def scripted_server(handle: Callable[[ServerConnection], None], **options: Any) -> Iterator[str]:
    """The address of a WebSocket server that does `handle` with each connection."""
    with serve(handle, "127.0.0.1", 0, **options) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


def says(*answers: object) -> Callable[[ServerConnection], None]:
    """Answers each message with the next of `answers`: JSON values, or texts as they are; then closes."""

    def handle(connection: ServerConnection) -> None:
        for answer in answers:
            connection.recv(timeout=PATIENCE_S)
            connection.send(answer if isinstance(answer, str) else json.dumps(answer))

    return handle


def observation(screen: object, reward: object = 0.0, *, done: object = False, **more: Any) -> Any:
    """An observation as the server sends it."""
    fields = {"screen": screen, "goal": "Click.", **more}
    return {"type": "observation", "data": {"observation": fields, "reward": reward, "done": done}}


def error(code: str, message: str = "no", **more: Any) -> Any:
    """An error as the server sends it."""
    return {"type": "error", "data": {"message": message, "code": code, **more}}
