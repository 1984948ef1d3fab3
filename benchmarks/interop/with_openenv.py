"""The arms `openenv` and `openenv_list` of benchmarks/interop/interop.py: OpenEnv's real server and its own client.

The server (package openenv-core, scripts/setup-openenv) serves the tests' environment, a screen of 1280x720 with a
square to be clicked, which travels as an image in base64 or as a nested list of numbers: 10 MB of JSON. The
own client is GenericEnvClient in a process of that interpreter, which leaves the list as a list; ours is at the
encoded image that a policy gets.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.interop.parts import Adapter, Asked, NotInstalledError, Played, Result, compared
from envs.contract.actions import Action, Click
from envs.contract.registry import make_env
from tests.envs.suites.openenv.servers import PYTHON, real_server
from tests.envs.suites.openenv.square_screen import square_of

SIZE = (1280, 720)
CLIENT = Path(__file__).with_name("openenv_client.py")
PROFILE = """
name = "square"
observation = {{ screenshot = "screen", encoding = "{encoding}", instruction = "goal" }}
reset = {{ arguments = {{ size = [{size[0]}, {size[1]}] }} }}
actions = {{ click = {{ kind = "click", x = "$x", y = "$y" }} }}
tasks = [{{ id = "click" }}]
"""


def actions_of(index: int, steps: int) -> list[Action]:
    """Random clicks; every other episode ends with one on the square."""
    rng = Random(f"clicks-{index}")
    clicks: list[Action] = [
        Click(x=rng.randrange(SIZE[0]), y=rng.randrange(SIZE[1])) for _ in range(steps - 1)
    ]
    if index % 2:
        x, y = square_of(index, SIZE)
        clicks.append(Click(x=x + 5, y=y + 5))
    return clicks


class OwnClient:
    """GenericEnvClient in another process, which is told what to play and says how long steps took."""

    def __init__(self, process: subprocess.Popen[str], steps: int) -> None:
        self._process = process
        self._steps = steps

    def play(self, index: int) -> Played:
        """See Side."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        points = [[click.x, click.y] for click in actions_of(index, self._steps)]
        asked = {"seed": index, "size": SIZE, "points": points}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        told = json.loads(self._process.stdout.readline())
        outcome = "pass" if told["reward"] and told["reward"] >= 1 else "fail"
        return Played(outcome, told["step_s"], told["reset_s"])


@contextmanager
def own_client(url: str, steps: int) -> Iterator[OwnClient]:
    """Yield the client's process."""
    with subprocess.Popen(
        [PYTHON, str(CLIENT), url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield OwnClient(process, steps)
        process.communicate()


def play(asked: Asked) -> Result:
    """With images in base64."""
    return _play(asked, "base64")


def play_list(asked: Asked) -> Result:
    """With nested lists: a tenth of the episodes, of two steps; the server takes seconds for each."""
    return _play(Asked(max(2, asked.episodes // 10), min(2, asked.steps)), "list")


def _play(asked: Asked, encoding: str) -> Result:
    if not Path(PYTHON).is_file():
        raise NotInstalledError("OpenEnv's server is not installed: scripts/setup-openenv")
    with tempfile.TemporaryDirectory() as folder, real_server() as server:
        file = Path(folder, "square.toml")
        file.write_text(PROFILE.format(encoding=encoding, size=SIZE))
        url = f"{server}/{encoding}"
        env = make_env(f"openenv:{file}", url=url)
        try:
            with own_client(url, asked.steps) as own:
                ours = Adapter(
                    env,
                    task=lambda _: "square/click",
                    seed=lambda index: index,
                    actions=lambda index: actions_of(index, asked.steps),
                )
                return compared(ours, own, asked)
        finally:
            env.close()
