"""Environments of our own behind OpenEnv's real server (package openenv-core), for tests.

    python real_server.py [PORT]

Serves on 127.0.0.1 and prints its port. Each path is an environment whose screen is sent in another way:
/list, /flat, /base64, /data_url, with four sessions each; /single has one. A task shows a square; it is done once the
square is clicked. `reset(fault=...)` makes one that breaks in the way that it says.
"""

from __future__ import annotations

import base64
import os
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

import no_mcp  # noqa: F401 - before the server, which imports what it stands in for
import uvicorn
from fastapi import FastAPI
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from square_screen import SIZE, pixels_of, png_of, square_of


class SquareAction(Action):
    """What the square's screen takes."""

    kind: str
    x: int | None = None
    y: int | None = None
    text: str | None = None


class SquareObservation(Observation):
    """A screen in one of four encodings."""

    screen: Any = None
    shape: list[int] | None = None
    goal: str = ""
    failed: str | None = None


class SquareEnvironment(Environment):
    """One screen with a square."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    encoding = "list"

    def __init__(self) -> None:
        super().__init__()
        self.fault, self.at, self.clicked, self.steps, self.size = "", (0, 0), False, 0, SIZE

    def reset(
        self, seed: int | None = None, fault: str = "", size: Sequence[int] = SIZE
    ) -> SquareObservation:
        self.size = (size[0], size[1])
        self.at = square_of(seed or 0, self.size)
        self.fault, self.clicked, self.steps = fault, False, 0
        if fault == "reset":
            raise RuntimeError("no browser")
        return self._observation()

    def step(self, action: SquareAction, **_: Any) -> SquareObservation:
        self.steps += 1
        if self.fault == "step":
            raise RuntimeError("the page crashed")
        if self.fault == "hang":
            threading.Event().wait(60)
        if self.fault == "exit":
            os._exit(3)
        if action.kind == "click":
            x, y = action.x - self.at[0], action.y - self.at[1]
            self.clicked = self.clicked or (0 <= x < 12 and 0 <= y < 12)
        observation = self._observation()
        observation.failed = "unknown action" if self.fault == "refuses" else None
        observation.done = self.clicked or self.fault == "done"
        observation.reward = {"null": None, "seven": 7.0}.get(
            self.fault, 1.0 if self.clicked else 0.0
        )
        return observation

    def _observation(self) -> SquareObservation:
        screen, shape = self._screen()
        return SquareObservation(screen=screen, shape=shape, goal="Click the square.", reward=0.0)

    def _screen(self) -> tuple[Any, list[int] | None]:
        if self.fault == "blind":
            return None, None
        pixels = pixels_of(self.at, clicked=self.clicked, size=self.size)
        if self.encoding == "flat":
            return [number for row in pixels for pixel in row for number in pixel], [
                SIZE[1],
                SIZE[0],
                3,
            ]
        if self.encoding == "list":
            return pixels, None
        text = base64.b64encode(png_of(pixels)).decode()
        return ("data:image/png;base64," if self.encoding == "data_url" else "") + text, None

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


def main() -> None:
    """Serve all of them."""
    app = FastAPI()
    for path, encoding, sessions in (
        ("list", "list", 4), ("flat", "flat", 4), ("base64", "base64", 4), ("data_url", "data_url", 4),
        ("single", "base64", 1),
    ):  # fmt: skip
        environment = type("Square", (SquareEnvironment,), {"encoding": encoding})
        app.mount(
            f"/{path}",
            create_fastapi_app(
                environment, SquareAction, SquareObservation, max_concurrent_envs=sessions
            ),
        )
    listening = socket.create_server(("127.0.0.1", int(sys.argv[1]) if sys.argv[1:] else 0))
    sys.stdout.write(f"{listening.getsockname()[1]}\n")
    sys.stdout.flush()
    config = uvicorn.Config(app, log_level="critical")
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
