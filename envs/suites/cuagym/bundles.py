"""The task bundles of CUA-Gym, and the mocks of CUA-Gym-Hub that they name, read from the user's folder.

    Hub            the folders of the mocks, and what the bundles call them
    Bundle         one task: its instruction, its setup program, its reward program, its mocks
    read_bundles   all bundles of a folder: those that can be played, those that are broken, those that are
                   left out
    fill           a program's source with the addresses of mocks and the id of a session filled in
    reward_of      the reward that a reward program printed

The folder is a checkout of CUA-Gym, with the mocks in hub/websites and the bundles of its data set unpacked in
cua_gym_tasks, or a checkout of CUA-Gym-Hub, with websites and cua_gym_tasks. A bundle is a folder with task.json,
reward.py and initial_setup.py. Their sources name a mock by a placeholder such as __CUA_GYM_GMAIL_URL__, or by
the address at which its makers serve it; both are filled in for each episode, so that the files stay as they are.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from bus.error_texts import one_line
from bus.errors import ActionError, TaskError
from envs.contract.actions import Action, action_from_dict

WEBSITES = ("hub/websites", "websites")
TASKS = "cua_gym_tasks"
SUFFIX = "_mock"
SETUP, REWARD = "initial_setup.py", "reward.py"
SOLUTION = "actions.json"
"""A list of actions that do the task, in CSS pixels, as a person did it. Bundles of CUA-Gym have none."""
SID_FILE = "/tmp/task_web_sid"  # noqa: S108 - as the programs write it
"""Where the programs of a bundle hand the id of their session to each other."""
SID = "__CUA_GYM_SID__"
"""A placeholder for that id, in bundles that were converted to a form without the file."""

_PLACEHOLDER = re.compile(r"__CUA_GYM_([A-Z0-9_]+?)_(URL|HOST)__")
_HOSTED = re.compile(r"(https?://)?cua-gym-([a-z0-9-]+)\.xlang\.ai")
_REWARD = re.compile(r"REWARD:\s*(\S+)")
_MOST_BYTES = 8 << 20  # of one file of a bundle


class Hub:
    """The mocks in a folder."""

    def __init__(self, folder: Path) -> None:
        """Read the names of the mocks. Raises TaskError if the folder has none."""
        places = [folder / name for name in WEBSITES]
        self.websites = next((place for place in places if place.is_dir()), places[0])
        self.mocks = (
            {place.name: place for place in sorted(self.websites.glob(f"*{SUFFIX}"))}
            if self.websites.is_dir()
            else {}
        )
        if not self.mocks:
            raise TaskError(
                f"{folder} has no mocks of CUA-Gym: want {' or '.join(WEBSITES)} with folders *{SUFFIX}, a "
                "checkout of CUA-Gym with its submodule, or of CUA-Gym-Hub"
            )

    @cached_property
    def _by_word(self) -> Mapping[str, str]:
        return {_word(name.removesuffix(SUFFIX)): name for name in self.mocks}

    def mock_of(self, word: str) -> str | None:
        """Return the mock that a placeholder or a host names, e.g. of GOOGLE_DOCS or google-docs."""
        return self._by_word.get(_word(word).removesuffix("mock"))

    def problem(self, mock: str) -> str:
        """Return why a mock cannot be started; empty if it can."""
        place = self.mocks[mock]
        if not vite_of(place).is_file():
            return f"{mock} is not installed: run npm install in {place}"
        if not (place / "dist" / "index.html").is_file():
            return f"{mock} is not built: run npm run build in {place}"
        return ""


def vite_of(mock: Path) -> Path:
    """Return the program that serves a mock's build: that of its `npm run preview`."""
    return mock / "node_modules" / "vite" / "bin" / "vite.js"


@dataclass(frozen=True)
class Bundle:
    """One task. `setup` and `reward` are the sources of its programs, with placeholders."""

    id: str
    folder: Path
    instruction: str
    setup: str
    reward: str
    mocks: tuple[str, ...]  # that its programs name, the first one first
    solution: tuple[Action, ...] = ()

    @property
    def digest(self) -> str:
        """A digest of what the task is."""
        parts = json.dumps([self.instruction, self.setup, self.reward])
        return hashlib.blake2b(parts.encode(), digest_size=8).hexdigest()


@dataclass
class Bundles:
    """What a folder of bundles has: those that can be played, and why the others cannot."""

    good: dict[str, Bundle] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)  # id -> what is wrong with it
    left_out: dict[str, str] = field(default_factory=dict)  # id -> why it is none of this suite's


class _BrokenError(Exception):
    """A bundle cannot be played."""


class _ElsewhereError(Exception):
    """A bundle is sound and not played here."""


def read_bundles(folder: Path, hub: Hub) -> Bundles:
    """Return the bundles of a folder, by id. Raises TaskError if it has none."""
    place = folder / TASKS
    folders = sorted(path for path in place.glob("*") if path.is_dir()) if place.is_dir() else []
    if not folders:
        raise TaskError(
            f"{place} has no task bundles: unpack those of CUA-Gym's data set there, each a folder with task.json, "
            f"{SETUP} and {REWARD}"
        )
    bundles = Bundles()
    for path in folders:
        try:
            bundles.good[path.name] = _read(path, hub)
        except _BrokenError as error:
            bundles.broken[path.name] = str(error)
        except _ElsewhereError as error:
            bundles.left_out[path.name] = str(error)
    return bundles


def _read(folder: Path, hub: Hub) -> Bundle:
    text = _text(folder, "task.json")
    try:
        about = json.loads(text)
    except ValueError as error:
        raise _BrokenError(f"task.json is no JSON: {one_line(error)}") from None
    if not isinstance(about, dict):
        raise _BrokenError("task.json is no object")
    setup, reward = (_text(folder, name, optional=True) for name in (SETUP, REWARD))
    mocks = _mocks_of(f"{setup}\n{reward}", hub)
    if not mocks:
        raise _ElsewhereError(
            "it names no mock: it is played on a desktop, or its addresses are filled in already"
        )
    instruction = about.get("instruction")
    if not isinstance(instruction, str) or not instruction.strip():
        raise _BrokenError("task.json has no instruction")
    for name, source in ((SETUP, setup), (REWARD, reward)):
        if not source.strip():
            raise _BrokenError(f"{name} is missing or empty")
        try:
            ast.parse(source)
        except (SyntaxError, ValueError) as error:
            raise _BrokenError(f"{name} cannot be compiled: {one_line(error)}") from None
    if "REWARD:" not in reward:
        raise _BrokenError(f"{REWARD} prints no line `REWARD: NUMBER`")
    solution = _solution(_text(folder, SOLUTION, optional=True))
    return Bundle(folder.name, folder, instruction.strip(), setup, reward, mocks, solution)


def _solution(text: str) -> tuple[Action, ...]:
    """Return the actions of a solution's file. Raises _BrokenError."""
    try:
        values = json.loads(text) if text else []
        if not isinstance(values, list):
            raise _BrokenError(f"{SOLUTION} is no list of actions")
        return tuple(action_from_dict(value) for value in values)
    except (ValueError, ActionError) as error:
        raise _BrokenError(f"{SOLUTION}: {one_line(error)}") from None


def _text(folder: Path, name: str, *, optional: bool = False) -> str:
    path = folder / name
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise _BrokenError(f"{name} has more than {_MOST_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if optional:
            return ""
        raise _BrokenError(f"{name} is missing") from None
    except (OSError, UnicodeError) as error:
        raise _BrokenError(f"{name} cannot be read: {one_line(error)}") from None


def _mocks_of(source: str, hub: Hub) -> tuple[str, ...]:
    """Return the mocks that a source names, in their order. Raises _BrokenError for one that is not there."""
    places = [(match.start(), match.group(1)) for match in _PLACEHOLDER.finditer(source)]
    places += [(match.start(), match.group(2)) for match in _HOSTED.finditer(source)]
    mocks: dict[str, None] = {}
    for _, word in sorted(places):
        mock = hub.mock_of(word)
        if mock is None:
            raise _BrokenError(
                f"it needs a mock {word.lower()}, which {hub.websites} does not have"
            )
        mocks[mock] = None
    return tuple(mocks)


def _word(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def fill(source: str, hub: Hub, hosts: Mapping[str, str], sid: str, sid_file: Path) -> str:
    """Return a source with `host:port` of each mock, the session and the place of the file with it filled in."""

    def placed(match: re.Match[str]) -> str:
        host = hosts[hub.mock_of(match.group(1)) or ""]
        return host if match.group(2) == "HOST" else f"http://{host}"

    def hosted(match: re.Match[str]) -> str:
        host = hosts[hub.mock_of(match.group(2)) or ""]
        return f"http://{host}" if match.group(1) else host

    source = _HOSTED.sub(hosted, _PLACEHOLDER.sub(placed, source))
    return source.replace(SID, sid).replace(SID_FILE, str(sid_file))


def reward_of(out: str) -> float | None:
    """Return the last reward that a program printed, from 0 to 1; None if it printed no number."""
    rewards = _REWARD.findall(out)
    try:
        reward = float(rewards[-1])
    except (IndexError, ValueError):
        return None
    return None if math.isnan(reward) else min(max(reward, 0.0), 1.0)
