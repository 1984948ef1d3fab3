"""The arm `cuabench` of benchmarks/interop/interop.py: a worker by cua-bench's published protocol, in its own process.

PyPI's cua-bench has no code, so the worker is that of the tests (tests/examples/cuabench/worker_server.py): the routes
and answers of cua_bench/workers/worker_server.py, with a screen of 1280x720 that holds a square to be clicked.
The own client does what that package's does for a step: a request, its JSON, the image's bytes.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.interop.parts import Adapter, Asked, Played, Result, compared
from envs.contract.actions import Action, Click, Done
from envs.contract.registry import make_env
from tests.examples.cuabench.worker_process import EXAMPLE, own_suite, worker

WIDTH, HEIGHT = 1280, 720
ENV_PATH = f"screens/{WIDTH}x{HEIGHT}"


def actions_of(index: int, steps: int) -> list[Action]:
    """Random clicks; every other episode ends with one on the square, of which see worker_server.py."""
    rng = Random(f"clicks-{index}")
    clicks: list[Action] = [
        Click(x=rng.randrange(WIDTH), y=rng.randrange(HEIGHT)) for _ in range(steps - 2)
    ]
    if index % 2:
        square = Random(index)
        x, y = square.randrange(4, WIDTH - 16), square.randrange(4, HEIGHT - 16)
        clicks.append(Click(x=x + 5, y=y + 5))
    return [*clicks, Done()]


sys.path.append(str(EXAMPLE))  # where the suite's package is


class OwnClient:
    """A loop over the worker's routes; one request each, as cua_bench/workers/worker_client.py does."""

    def __init__(self, url: str, steps: int) -> None:
        self._url = url
        self._steps = steps

    def play(self, index: int) -> Played:
        """See Side."""
        played = Played("invalid")
        began = time.perf_counter()
        asked = {"env_path": ENV_PATH, "task_index": index, "split": "train", "timeout": 3600}
        env_id = self._post("/reset", asked)["env_id"]
        played.reset_s = time.perf_counter() - began
        for action in actions_of(index, self._steps):
            payload: dict[str, Any] = {"type": "DoneAction"}
            if isinstance(action, Click):
                payload = {"type": "ClickAction", "x": action.x, "y": action.y}
            began = time.perf_counter()
            answer = self._post("/step", {"action": payload, "env_id": env_id})
            base64.b64decode(answer["screenshot"])
            played.step_s.append(time.perf_counter() - began)
        played.outcome = "pass" if answer["reward"] >= 1 else "fail"
        return played

    def _post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        with urlopen(
            Request(self._url + route, json.dumps(body).encode(), headers), timeout=60
        ) as got:
            answer: dict[str, Any] = json.load(got)
        return answer


def play(asked: Asked) -> Result:
    """Both sides at one worker."""
    with tempfile.TemporaryDirectory() as folder, worker() as url:
        file = Path(folder, "squares.toml")
        tasks = f"[[tasks]]\nid = 'square'\ncount = {asked.episodes}\n"
        file.write_text(f'env_path = "{ENV_PATH}"\n{tasks}')
        env = make_env(own_suite(file), url=url)
        try:
            ours = Adapter(
                env,
                task=lambda index: f"cuabench/square-{index}",
                seed=lambda index: index,
                actions=lambda index: actions_of(index, asked.steps),
            )
            return compared(ours, OwnClient(url, asked.steps), asked)
        finally:
            env.close()
