"""CuagymEnv: plays the bundles of CUA-Gym in its mocks.

An episode has a session of its own in each mock that its bundle names. The bundle's setup program writes the
initial state into it, the page shows the mock with this session, and the reward program reads the state that the
mock has then. What the session left in a mock is removed with the episode.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bus.errors import EnvError, NoOracleError
from envs.contract.actions import (
    Action,
    Answer,
    Done,
    Fail,
    action_from_dict,
    action_to_dict,
)
from envs.contract.base import Observation, Verdict, task_of
from envs.contract.elements import Element, ScreenState, elements_of, state_of
from envs.suites.cuagym.bundles import (
    REWARD,
    SETUP,
    SOLUTION,
    SUFFIX,
    Bundle,
    Hub,
    fill,
    reward_of,
)
from envs.suites.cuagym.programs import ProgramResult, Programs
from envs.tools.app_server import ask
from envs.tools.browser.accessibility import read_page, route_of
from envs.tools.browser.gui import BrowserGui
from envs.tools.shared_servers import SharedServers

HOST = "127.0.0.1"
SHOWS = """(() => [...document.querySelectorAll("body *")].some((element) => {
  const box = element.getBoundingClientRect();
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  return box.width > 0 && box.height > 0 && (own || /^(img|svg|canvas|video|input|button)$/i.test(element.tagName));
}))()"""
"""Whether anything of a page can be seen."""
BLANK_MS = 3000  # of the page's time after which one that shows nothing is broken
FORGET_S = 5.0  # the longest answer of a mock that forgets a session
LEFTOVERS = (
    ".mock-states/{sid}.json",
    ".mock-states/{sid}.initial.json",
    ".mock-files/{sid}",
    ".mock-uploads/{sid}",
)
"""What a session leaves in the folder of a mock."""


@dataclass(frozen=True)
class _Session:
    """What one episode has in the mocks."""

    bundle: Bundle
    sid: str
    hosts: Mapping[str, str]  # mock -> host:port
    folders: tuple[Path, ...]  # where the servers of its mocks keep sessions


class CuagymEnv:
    """Plays suite `cuagym`. See envs.contract.base.GuiEnv for the contract."""

    def __init__(
        self,
        name: str,
        bundles: Mapping[str, Bundle],
        hub: Hub,
        gui: BrowserGui,
        servers: SharedServers,
        *,
        python: str,
        program_s: float,
    ) -> None:
        """Prepare to play `bundles` of suite `name`, by the ids of their tasks; the first reset starts all."""
        self._name = name
        self._bundles = bundles
        self._hub = hub
        self._gui = gui
        self._servers = servers
        self._servers.join()
        self._programs = Programs(python)
        self._program_s = program_s
        self._session: _Session | None = None
        self._verdict: Verdict | None = None  # on the present state, once it was evaluated
        self._actions: list[Action] = []  # of the episode so far
        self._opened: tuple[str, ...] = ()  # addresses that the setup program opened in a browser
        self._over = True
        self._closed = False

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start `options["task"]`, a Task of this suite or its id, with the state of its setup program."""
        if self._closed:
            raise EnvError("the environment is closed")
        bundle = task_of(options, self._bundles, self._name)
        self._leave()
        try:
            session = self._begin(bundle, seed or 0)
            observation = self._gui.look()
        except BaseException:
            self._leave()
            raise
        self._verdict, self._over, self._actions = None, False, []
        return observation, {"instruction": _instruction(session), "app_log": self._gui.take_log()}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Perform the action. The reward program runs after the step that ends the episode."""
        if self._over:
            raise EnvError("the episode is over; call reset before the next step")
        self._verdict = None
        self._actions.append(action)
        observation = self._gui.perform(action)
        if isinstance(action, Fail):
            self._verdict = Verdict("fail", "the policy said that the task cannot be done")
        self._over = isinstance(action, Done | Fail | Answer)
        reward = (self.evaluate().reward or 0.0) if self._over else 0.0
        return observation, reward, self._over, False, {"app_log": self._gui.take_log()}

    def evaluate(self) -> Verdict:
        """Return the reward of the bundle's reward program as a verdict; invalid if it gives none."""
        if self._session is None:
            return Verdict("invalid", "no episode is being played, or its page broke")
        if self._verdict is None:
            result = self._run(REWARD, self._session.bundle.reward, skip_sleep=False)
            self._verdict = _verdict(result)
        return self._verdict

    def oracle_action(self) -> Action:
        """Return the next action of the solution that the bundle has.

        Raises NoOracleError if it has none, EnvError if other actions have been played.
        """
        if self._session is None:
            raise EnvError("no episode is being played; call reset first")
        scale = self._gui.options.scale
        solution = tuple(in_pixels(action, scale) for action in self._session.bundle.solution)
        if not solution:
            raise NoOracleError(f"{self._session.bundle.id} has no {SOLUTION}")
        number = len(self._actions)
        if tuple(self._actions) != solution[:number]:
            raise EnvError(f"the solution of {self._session.bundle.id} begins with other actions")
        return Done() if number == len(solution) else solution[number]

    def elements(self) -> list[Element]:
        """Return the elements that can be seen and reached. Raises EnvError."""
        return elements_of([read_page(self._gui.tab)])

    def state(self) -> ScreenState:
        """Return the state of the screen: the page's address and its skeleton. Raises EnvError."""
        return state_of(route_of(self._gui.tab), [read_page(self._gui.tab)])

    @property
    def gui(self) -> BrowserGui:
        """The browser of the environment, for tools that look into the page."""
        return self._gui

    @property
    def pids(self) -> list[int]:
        """The process ids of what the environment runs beside its browser: mocks and programs."""
        own = self._programs.pid
        return [*self._servers.pids(), *([] if own is None else [own])]

    def close(self) -> None:
        """End the browser and the programs; the last environment ends the mocks. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._leave()
        self._gui.close()
        self._programs.close()
        self._servers.leave()

    def _begin(self, bundle: Bundle, seed: int) -> _Session:
        """Start the mocks, run the setup program, open the page, and return the session."""
        hosts, folders = {}, []
        for mock in bundle.mocks:
            server = self._servers.take(mock)
            hosts[mock] = f"{HOST}:{server.port}"
            folders += [server.folder, self._hub.mocks[mock]]
            # From here on `_leave` gives the servers back.
            self._session = _Session(bundle, uuid.uuid4().hex, dict(hosts), tuple(folders))
        session = self._set_up()
        self._gui.begin(list(hosts.values()), seed=seed)
        address = self._addresses(session)[0]
        self._gui.open(address)
        self._look_blank(address)
        return session

    def _set_up(self) -> _Session:
        """Run the setup program and return the session with the id that it chose."""
        assert self._session is not None
        session = self._session
        result = self._run(SETUP, session.bundle.setup, skip_sleep=True)
        if why := result.why_failed:
            raise EnvError(f"{session.bundle.id}: {SETUP} failed: {why}")
        self._opened = result.opened
        sid = (
            self._sid_file.read_text("utf-8", "replace").strip() if self._sid_file.is_file() else ""
        )
        if not all(letter.isalnum() or letter in "-_" for letter in sid):
            raise EnvError(f"{session.bundle.id}: {SETUP} chose no id of a session: {sid[:40]!r}")
        if sid:
            session = _Session(session.bundle, sid, session.hosts, session.folders)
            self._session = session
        return session

    def _addresses(self, session: _Session) -> list[str]:
        """Return the addresses that the setup program opened in a browser; without one, those of the mocks."""
        return list(self._opened) or [
            f"http://{host}/?sid={session.sid}" for host in session.hosts.values()
        ]

    def _look_blank(self, address: str) -> None:
        """Raise EnvError if the page shows nothing, as that of a mock that is broken."""
        if self._gui.ask(SHOWS):
            return
        self._gui.visit.settle(BLANK_MS, BLANK_MS)
        if not self._gui.ask(SHOWS):
            texts = [event.text for event in self._gui.take_events() if event.kind == "exception"]
            because = f": {texts[0][:200]}" if texts else ""
            raise EnvError(f"the page of {address} is blank{because}")

    @property
    def _sid_file(self) -> Path:
        return self._programs.folder / "task_web_sid"

    def _run(self, name: str, source: str, *, skip_sleep: bool) -> ProgramResult:
        assert self._session is not None
        session = self._session
        addresses = [(HOST, int(host.rpartition(":")[2])) for host in session.hosts.values()]
        text = fill(source, self._hub, session.hosts, session.sid, self._sid_file)
        return self._programs.run(
            name, text, addresses, deadline_s=self._program_s, skip_sleep=skip_sleep
        )

    def _leave(self) -> None:
        """End the episode: its page, its session in the mocks, the files of its programs."""
        session, self._session = self._session, None
        self._verdict, self._over, self._opened = None, True, ()
        self._gui.leave()
        if session is None:
            return
        for host in session.hosts.values():
            with suppress(EnvError):  # the server has ended, and its sessions with it
                ask(
                    "POST",
                    f"http://{host}/post?sid={session.sid}",
                    body={"action": "reset"},
                    deadline_s=FORGET_S,
                )
        for folder in session.folders:
            for leftover in LEFTOVERS:
                path = folder / leftover.format(sid=session.sid)
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        self._programs.empty()
        self._servers.give_back(session.hosts)


def in_pixels(action: Action, scale: float) -> Action:
    """Return an action in CSS pixels as one in pixels of the screenshot."""
    fields = action_to_dict(action)
    for name in ("x", "y"):
        if name in fields:
            fields[name] = round(fields[name] * scale)
    if "path" in fields:
        fields["path"] = [[round(x * scale), round(y * scale)] for x, y in fields["path"]]
    return action_from_dict(fields)


def _instruction(session: _Session) -> str:
    """Return the bundle's instruction; with several mocks also where they are."""
    if len(session.hosts) == 1:
        return session.bundle.instruction
    places = [
        f"{mock.removesuffix(SUFFIX)}: http://{host}/?sid={session.sid}"
        for mock, host in session.hosts.items()
    ]
    return "\n".join([session.bundle.instruction, *places])


def _verdict(result: ProgramResult) -> Verdict:
    """Return the verdict of what a reward program did."""
    if why := result.why_failed:
        return Verdict("invalid", f"{REWARD} failed: {why}")
    reward = reward_of(result.out)
    lines = [line.strip() for line in result.out.splitlines() if line.strip()]
    if reward is None:
        return Verdict("invalid", f"{REWARD} printed no reward: {' | '.join(lines[-2:])[:300]}")
    why = " | ".join(line for line in lines if not line.startswith("REWARD:"))
    return Verdict.scored(reward, f"reward {reward:g}{why and f': {why[:500]}'}")
