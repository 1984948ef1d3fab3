"""CuagymSuite: the tasks of a folder, their options, and a check of what they need."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field

from bus.errors import MissingPartError, TaskError
from envs.contract.base import Task
from envs.contract.options import ImageEncoding, Pause, Seconds, Size, checked
from envs.suites.cuagym.bundles import Hub, read_bundles, vite_of
from envs.suites.cuagym.env import HOST, CuagymEnv
from envs.suites.cuagym.programs import check_python
from envs.tools.app_server import AppServer
from envs.tools.browser.gui import BrowserGui, GuiOptions
from envs.tools.browser.process import find_chromium
from envs.tools.child_program import find_named
from envs.tools.shared_servers import SharedServers

logger = logging.getLogger(__name__)

MAX_STEPS = 30
START_S = 20.0  # the longest start of a mock
MOST_IDLE = 16  # mocks that stay running without an episode


class CuagymSuite:
    """The suite `cuagym:FOLDER`: the bundles of a folder that are played in its mocks, by id."""

    def __init__(self, of: str) -> None:
        self.name = f"cuagym:{of}"
        folder = Path(of).expanduser().resolve()
        if not folder.is_dir():
            raise TaskError(f"{self.name}: there is no folder {folder}")
        self._hub = Hub(folder)
        bundles = read_bundles(folder, self._hub)
        self._bundles = {f"cuagym/{name}": bundle for name, bundle in bundles.good.items()}
        self.tasks: Mapping[str, Task] = {
            f"cuagym/{name}": Task(
                f"cuagym/{name}",
                self.name,
                bundle.instruction,
                max_steps=MAX_STEPS,
                params={"mocks": bundle.mocks, "bundle": bundle.digest},
            )
            for name, bundle in bundles.good.items()
        }
        reasons = {
            **bundles.left_out,
            **{name: f"it is broken: {why}" for name, why in bundles.broken.items()},
        }
        self.left_out: Mapping[str, str] = {f"cuagym/{name}": why for name, why in reasons.items()}
        self.errors = [f"cuagym/{name}: {why}" for name, why in bundles.broken.items()]
        if self.errors:
            logger.warning(
                "%s: %d broken bundles are left out: dart env check lists them",
                self.name,
                len(self.errors),
            )
        self._servers: dict[str, SharedServers] = {}  # by the name of node

    @checked
    def make_env(
        self,
        *,
        size: Size = (1280, 720),
        scale: Annotated[float, Field(ge=0.25, le=4)] = 1.0,
        encoding: ImageEncoding = "png",
        step_ms: Pause = 500.0,
        python: str = "",
        node: str = "node",
        chromium: str = "",
        program_s: Seconds = 15.0,
        deadline_s: Seconds = 20.0,
    ) -> CuagymEnv:
        """Return an environment with a browser of its own; the first reset starts it and the mocks.

        `size` is the page's in CSS pixels, `scale` the pixels of the screenshot for each. `step_ms` is how far
        a page's clock advances at least at each step. `python` is the interpreter that runs the bundles'
        programs (default: dart's own), each for at most `program_s`; `node` runs the mocks, `chromium` is the
        browser's binary if it is not Debian's. `deadline_s` is the longest answer of a page. Raises TaskError.
        """
        gui = BrowserGui(
            partial(find_chromium, chromium),
            [HOST],
            GuiOptions(size, scale, encoding, step_ms=step_ms, deadline_s=deadline_s),
        )
        servers = self._servers.setdefault(
            node, SharedServers(partial(self._server, node), start_s=START_S, most=MOST_IDLE)
        )
        return CuagymEnv(
            self.name,
            self._bundles,
            self._hub,
            gui,
            servers,
            python=python or sys.executable,
            program_s=program_s,
        )

    @checked
    def longest_reset_s(
        self, *, program_s: Seconds = 15.0, deadline_s: Seconds = 20.0, **_: object
    ) -> float:
        """Return the seconds that a reset may take: a mock that starts, a setup program, a page that loads."""
        return START_S + program_s + deadline_s

    def check_parts(
        self,
        *,
        python: str = "",
        node: str = "node",
        chromium: str = "",
        tasks: Collection[str] | None = None,
        **_: object,
    ) -> None:
        """Raise MissingPartError if Chromium, Node, an interpreter or the build of a mock of `tasks` is missing."""
        find_chromium(chromium)
        if shutil.which(node) is None:
            raise MissingPartError(
                f"no program {node!r}: apt install nodejs npm, or set env.options.node"
            )
        if python and find_named(python) is None:
            raise MissingPartError(f"env.options.python: no interpreter at {python}")
        check_python(python or sys.executable)
        mocks = {
            mock
            for task_id, bundle in self._bundles.items()
            if tasks is None or task_id in tasks
            for mock in bundle.mocks
        }
        problems = [problem for mock in sorted(mocks) if (problem := self._hub.problem(mock))]
        if problems:
            more = f", and {len(problems) - 1} more mocks" if len(problems) > 1 else ""
            raise MissingPartError(f"{problems[0]}{more}")

    def _server(self, node: str, mock: str) -> tuple[AppServer, str]:
        """Return the server of a mock, which keeps sessions in a folder of its own, and where it answers."""
        place = self._hub.mocks[mock]
        command = [
            node,
            str(vite_of(place)),
            "preview",
            str(place),
            "--host",
            HOST,
            "--port",
            "{port}",
            "--strictPort",
        ]
        return AppServer(command, None, start_s=START_S), f"http://{HOST}:{{port}}/state?sid=dart"
