"""MobilegymSuite: MobileGym's tasks, their options, and a check of what they need."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from bus.errors import EnvError, MissingPartError, TaskError
from envs.contract.base import Task
from envs.contract.options import ImageEncoding, Pause, Seconds, checked
from envs.suites.mobilegym.env import HOST, Limits, MobilegymEnv
from envs.suites.mobilegym.tasks import (
    find_interpreter,
    make_tasks,
    phone_of,
    read_list,
    source,
)
from envs.tools.app_server import AppServer
from envs.tools.browser.gui import BrowserGui, GuiOptions
from envs.tools.browser.process import find_chromium
from envs.tools.child_program import ChildProgram
from envs.tools.shared_servers import SharedServers

START_S = 20.0  # the longest start of the server


class MobilegymSuite:
    """The suite `mobilegym:FOLDER`: the tasks of a checkout of MobileGym whose phone is built."""

    def __init__(self, of: str) -> None:
        self.name = f"mobilegym:{of}"
        self._folder = Path(of).expanduser().resolve()
        if not (self._folder / "bench_env").is_dir():
            raise TaskError(
                f"{self.name}: {self._folder} is no checkout of MobileGym: it has no folder bench_env"
            )
        self._servers: dict[str, SharedServers] = {}  # by the name of node
        self._lists: dict[str, dict[str, Any]] = {}  # by the interpreter

    @cached_property
    def tasks(self) -> Mapping[str, Task]:
        """The tasks by id: `mobilegym/` and MobileGym's own id, e.g. mobilegym/clock.AddAlarm.

        Raises TaskError without an interpreter that can load them.
        """
        return self._tasks("")

    @checked
    def make_env(
        self,
        *,
        scale: Annotated[float, Field(ge=0.25, le=4)] | None = None,
        encoding: ImageEncoding = "png",
        step_ms: Pause = 800.0,
        python: str = "",
        node: str = "node",
        chromium: str = "",
        setup_s: Seconds = 35.0,
        judge_s: Seconds = 30.0,
        deadline_s: Seconds = 20.0,
    ) -> MobilegymEnv:
        """Return an environment with a browser of its own; the first reset starts it and the phone's server.

        `scale` is the pixels of the screenshot for each of the phone's CSS pixels (None: as in MobileGym's
        benchmark). `step_ms` is how far the phone's clock advances at least after each action. `python` is
        the interpreter with the packages of bench_env, `node` runs the server, `chromium` is the browser's
        binary if it is not Debian's. `setup_s` is the longest time in which the phone loads and
        MobileGym's code sets a task up, `judge_s` that of a judgement, `deadline_s` the longest answer of the
        page. Raises TaskError.
        """
        try:
            interpreter = find_interpreter(python)
            phone = phone_of(self._list(interpreter))
        except (MissingPartError, EnvError) as error:
            raise TaskError(f"{self.name}: {error}") from None
        gui = BrowserGui(
            partial(find_chromium, chromium),
            [HOST],
            GuiOptions(
                phone.size,
                phone.scale if scale is None else scale,
                encoding,
                step_ms=step_ms,
                deadline_s=deadline_s,
                phone=phone.user_agent,
            ),
        )
        servers = self._servers.setdefault(
            node, SharedServers(partial(self._server, node), start_s=START_S, most=1)
        )
        return MobilegymEnv(
            self.name,
            partial(self._tasks, python),
            gui,
            servers,
            program=lambda: ChildProgram(interpreter, source(), folder=self._folder),
            limits=Limits(setup_s, judge_s),
        )

    @checked
    def longest_reset_s(self, *, setup_s: Seconds = 35.0, **_: object) -> float:
        """Return the seconds that a reset may take: a server that starts, and the set-up."""
        return START_S + setup_s

    def check_parts(
        self, *, python: str = "", node: str = "node", chromium: str = "", **_: object
    ) -> None:
        """Raise MissingPartError if Chromium, Node, the interpreter or the build of the phone is missing."""
        find_chromium(chromium)
        if shutil.which(node) is None:
            raise MissingPartError(
                f"no program {node!r}: install Node 22 or later, or set env.options.node"
            )
        interpreter = find_interpreter(python)
        for path, step in ((self._vite, "npm install"), (self._folder / "dist", "npm run build")):
            if not path.exists():
                raise MissingPartError(f"{self._folder} has no {path.name}: run {step} there")
        try:
            self._list(interpreter)
        except EnvError as error:
            raise MissingPartError(
                f"{interpreter} cannot load MobileGym's tasks: {error}"
            ) from None

    @property
    def _vite(self) -> Path:
        return self._folder / "node_modules" / "vite" / "bin" / "vite.js"

    def _tasks(self, python: str) -> Mapping[str, Task]:
        try:
            return make_tasks(self._list(find_interpreter(python)), self.name)
        except (MissingPartError, EnvError) as error:
            raise TaskError(f"{self.name}: {error}") from None

    def _list(self, interpreter: str) -> dict[str, Any]:
        if interpreter not in self._lists:
            self._lists[interpreter] = read_list(self._folder, interpreter)
        return self._lists[interpreter]

    def _server(self, node: str, _: str) -> tuple[AppServer, str]:
        """Return the server of the phone, which runs in a folder of its own, and where it answers."""
        command = [node, str(self._vite), "preview", str(self._folder), "--host", HOST]
        command += ["--port", "{port}", "--strictPort"]
        return AppServer(command, None, start_s=START_S), f"http://{HOST}:{{port}}/"
