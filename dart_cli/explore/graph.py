"""The folder of an exploration: screens, the actions that were tried on them, and where they led.

    Graph             the graph for writing, by one process at a time
    GraphReader       the graph for reading, even while another process writes it
    open_graph        opens the graph of a folder for writing
    read_graph        opens the graph of a folder for reading
    ExploreSettings   the settings of an exploration
    Screen, Edge, Start, Merge   the rows of the graph
    Sight             a screen as an explorer sees it, before it is a row
    screen_id         the key of a screen: its state within its application

FOLDER/settings.json  the settings
FOLDER/graph.sqlite   the rows, in write-ahead mode. A start or a step is one transaction, so that a kill
                      loses at most the one that is being written
FOLDER/screens/       screenshots named by their content (envs.contract.blobs.content_hash), written
                      before their rows
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field

from bus.endpoints import make_private_dir
from bus.errors import RunDirectoryError, UserError
from dart_cli.runtime.sqlite_file import Mode, SqliteFile
from dart_cli.runtime.work_folder import SETTINGS, WorkFolder, WorkSettings, refuse_foreign
from envs.contract.blobs import content_hash, image_suffix
from envs.contract.elements import Element, Operation, ScreenState, element_from_dict

Outcome = Literal["moved", "none", "error"]
"""The outcome of a step: it led to another screen; it stayed (a no-op); the environment refused it or
broke."""

DATABASE, SCREENS = "graph.sqlite", "screens"
APPLICATION_ID = 0x44415247
"""The SQLite application id of a graph of dart ("DARG")."""
SCHEMA = 2
"""The PRAGMA user_version; a graph with another version is refused."""

_TABLES = """
CREATE TABLE screens (
    id TEXT PRIMARY KEY,       -- screen_id(application, state)
    application TEXT NOT NULL,
    state TEXT NOT NULL,       -- ScreenState.id as the environment tells it
    route TEXT NOT NULL,
    reason TEXT NOT NULL,      -- why screens of this state are one
    screenshot TEXT NOT NULL,  -- of the first visit; a file of screens/
    width INTEGER NOT NULL,    -- pixels
    height INTEGER NOT NULL,
    elements TEXT NOT NULL,    -- JSON list, of the first visit
    depth INTEGER NOT NULL,    -- fewest steps from a start, of the paths that are known
    first_step INTEGER NOT NULL,  -- the step that led here first; 0 for a start
    visits INTEGER NOT NULL,
    ended INTEGER NOT NULL     -- 1 where the environment ended the episode here: nothing can be tried
);
CREATE TABLE edges (
    step INTEGER PRIMARY KEY,  -- from 1, over all slots
    slot INTEGER NOT NULL,
    episode INTEGER NOT NULL REFERENCES starts (episode),
    before TEXT NOT NULL REFERENCES screens (id),
    place TEXT NOT NULL,       -- Element.place; (before, place, action) is the edge's key
    action TEXT NOT NULL,
    element TEXT NOT NULL,     -- JSON, as it was seen at this step
    text TEXT NOT NULL,        -- what was typed; empty for other actions
    after TEXT,                -- NULL for an error
    outcome TEXT NOT NULL,     -- moved, none, error
    shot_before TEXT NOT NULL,
    shot_after TEXT,
    detail TEXT NOT NULL       -- of an error or a no-op, in words
);
CREATE INDEX edges_by_screen ON edges (before, place, action);
CREATE INDEX edges_by_episode ON edges (episode, step);
CREATE TABLE merges (          -- each other picture that counted as a known screen
    step INTEGER NOT NULL,
    screen TEXT NOT NULL REFERENCES screens (id),
    screenshot TEXT NOT NULL,
    reason TEXT NOT NULL,
    PRIMARY KEY (screen, screenshot)
) WITHOUT ROWID;
CREATE TABLE starts (
    episode INTEGER PRIMARY KEY,  -- from 1, over all slots
    slot INTEGER NOT NULL,
    application TEXT NOT NULL,
    task TEXT NOT NULL,
    seed INTEGER NOT NULL,
    screen TEXT NOT NULL REFERENCES screens (id),
    screenshot TEXT NOT NULL,
    step INTEGER NOT NULL         -- the newest one when it began
);
"""


class ExploreSettings(WorkSettings):
    """The settings of an exploration."""

    what: ClassVar = "exploration"
    verb: ClassVar = "dart explore"
    option: ClassVar = "--out"
    may_differ: ClassVar = ("tasks", "seeds", "steps", "back_every", "deny")
    """Settings that may differ when the exploration is continued."""
    can_begin_anew: ClassVar = False

    suite: str = ""
    options: dict[str, Any] = Field(default_factory=dict)  # of its environments
    tasks: list[str] = Field(default_factory=list)
    application: str = ""
    seeds: int = 1
    first_seed: int = 0
    chooser: str = "count"
    seed: int = 0
    steps: int = 0
    back_every: int = 0
    deny: list[str] = Field(default_factory=list)


@dataclass(frozen=True)
class Sight:
    """A screen as an explorer sees it, before it is a row."""

    application: str
    state: ScreenState
    elements: tuple[Element, ...]
    screenshot: bytes  # encoded
    width: int  # pixels
    height: int
    has_ended: bool = False  # the environment ended the episode here
    has_tree: bool = True  # False: the elements are cells of a grid


@dataclass(frozen=True)
class Screen:
    """A screen of the graph, as it was at the first visit."""

    id: str
    application: str
    state: str
    route: str
    reason: str
    screenshot: str
    width: int
    height: int
    elements: tuple[Element, ...]
    depth: int
    first_step: int
    visits: int
    has_ended: bool


@dataclass(frozen=True)
class Edge:
    """One step: the action that was tried on a screen, and its outcome."""

    step: int
    slot: int
    episode: int
    before: str
    element: Element
    action: Operation
    text: str
    after: str | None
    outcome: Outcome
    shot_before: str
    shot_after: str | None
    detail: str

    @property
    def key(self) -> tuple[str, str, str]:
        """The key (screen, place, action), which all tries of one action share."""
        return self.before, self.element.place, self.action


@dataclass(frozen=True)
class Merge:
    """Another picture that counted as a screen of the graph, and why."""

    step: int
    screen: str
    screenshot: str
    reason: str


@dataclass(frozen=True)
class Start:
    """The beginning of an episode: its task and seed, and the first screen."""

    episode: int
    slot: int
    application: str
    task: str
    seed: int
    screen: str
    screenshot: str
    step: int


def screen_id(application: str, state: str, *, has_ended: bool = False) -> str:
    """Return the key of a screen, 32 hex digits.

    Applications never share a screen. A state that ends an episode is another screen than the same state
    within one.
    """
    text = f"{application}\0{state}\0{'ended' if has_ended else ''}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class GraphReader(SqliteFile):
    """A graph for reading. Use it as a context manager, or call `close`."""

    damaged = "begin anew in another folder"

    def __init__(self, folder: Path, mode: Mode = "ro") -> None:
        super().__init__(folder / DATABASE, mode)
        self.folder = folder
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def screens(self) -> list[Screen]:
        """Return all screens, in the order of their first visits."""
        return [_screen(row) for row in self._rows("SELECT * FROM screens ORDER BY rowid")]

    def screen(self, key: str) -> Screen:
        """Return a screen by its key. Raises UserError if there is none."""
        for row in self._rows("SELECT * FROM screens WHERE id = ?", (key,)):
            return _screen(row)
        raise UserError(f"{self.folder} has no screen {key!r}")

    def edges(self, *, episode: int | None = None) -> list[Edge]:
        """Return all steps, or the steps of one episode, in their order."""
        rows = self._rows(
            "SELECT * FROM edges WHERE ? IS NULL OR episode = ? ORDER BY step", (episode, episode)
        )
        return [_edge(row) for row in rows]

    def merges(self) -> list[Merge]:
        """Return the other pictures that counted as screens of the graph, in their order."""
        return [Merge(**row) for row in self._rows("SELECT * FROM merges ORDER BY step, screen")]

    def starts(self) -> list[Start]:
        """Return the beginnings of the episodes, in their order."""
        return [Start(**row) for row in self._rows("SELECT * FROM starts ORDER BY episode")]

    def settings(self) -> dict[str, Any]:
        """Return the settings of the exploration."""
        values: dict[str, Any] = json.loads((self.folder / SETTINGS).read_bytes())
        return values

    @property
    def steps(self) -> int:
        """The number of steps so far, over all slots and runs."""
        [row] = self._rows("SELECT COALESCE(MAX(step), 0) AS steps FROM edges")
        return int(row["steps"])

    def screenshot_path(self, name: str) -> Path:
        """Return the file of a screenshot. Raises UserError if it is missing."""
        for suffix in ("png", "webp", "jpg"):
            if (path := self.folder / SCREENS / f"{name}.{suffix}").is_file():
                return path
        raise UserError(f"{self.folder / SCREENS} lacks the screenshot {name}; is it a whole copy?")

    def screenshot(self, name: str) -> bytes:
        """Return an encoded screenshot by its name."""
        return self.screenshot_path(name).read_bytes()

    def _prepare(self) -> None:
        """Raise RunDirectoryError for a file that is no graph, or has another version."""
        [[mark]] = self._rows("PRAGMA application_id")
        [[version]] = self._rows("PRAGMA user_version")
        if mark != APPLICATION_ID:
            raise RunDirectoryError(
                f"{self._path} is no graph of `dart explore`; name another folder"
            )
        if version != SCHEMA:
            raise RunDirectoryError(
                f"{self._path} has schema {version}, this dart reads {SCHEMA}; use the version that made it"
            )


class Graph(GraphReader):
    """The one writer of a folder. What a method has returned is durable."""

    def __init__(self, folder: Path, settings: ExploreSettings) -> None:
        refuse_foreign(folder, settings)
        make_private_dir(folder)
        self._settings_folder = WorkFolder(folder, settings)
        try:
            make_private_dir(folder / SCREENS)
            super().__init__(folder, "rwc")
        except BaseException:
            self._settings_folder.close()
            raise
        self._depths = {
            row["id"]: row["depth"] for row in self._rows("SELECT id, depth FROM screens")
        }
        self._next: dict[str, set[str]] = {}
        for row in self._rows("SELECT DISTINCT before, after FROM edges WHERE outcome = 'moved'"):
            self._next.setdefault(row["before"], set()).add(row["after"])

    def close(self) -> None:
        """Merge the write-ahead log into the file, and release the folder."""
        super().close()
        self._settings_folder.close()

    def add_start(self, task: str, seed: int, slot: int, sight: Sight) -> Start:
        """Write the beginning of an episode, and return its row."""
        shot, step = self._keep(sight.screenshot), self.steps
        with self._transaction():
            key = self._see(sight, shot, step, depth=0)
            cursor = self._connection.execute(
                "INSERT INTO starts (slot, application, task, seed, screen, screenshot, step) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (slot, sight.application, task, seed, key, shot, step),
            )
        return Start(cursor.lastrowid or 0, slot, sight.application, task, seed, key, shot, step)

    def add_edge(
        self,
        *,
        episode: int,
        slot: int,
        before: str,
        shot_before: str,
        element: Element,
        action: Operation,
        text: str = "",
        after: Sight | None,
        detail: str = "",
    ) -> Edge:
        """Write a step and return its row.

        Without `after` the step was an error, which `detail` describes.
        """
        shot = None if after is None else self._keep(after.screenshot)
        with self._transaction():
            step, key = self.steps + 1, None
            if after is not None and shot is not None:
                key = self._see(after, shot, step, depth=self._depths[before] + 1)
            outcome: Outcome = "error" if key is None else "none" if key == before else "moved"
            self._connection.execute(
                "INSERT INTO edges VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    step,
                    slot,
                    episode,
                    before,
                    element.place,
                    action,
                    json.dumps(asdict(element)),
                    text,
                    key,
                    outcome,
                    shot_before,
                    shot,
                    detail,
                ),
            )
            if key is not None and outcome == "moved":
                self._next.setdefault(before, set()).add(key)
                self._lower(key, self._depths[before] + 1)
        return Edge(
            step=step,
            slot=slot,
            episode=episode,
            before=before,
            element=element,
            action=action,
            text=text,
            after=key,
            outcome=outcome,
            shot_before=shot_before,
            shot_after=shot,
            detail=detail,
        )

    def _see(self, sight: Sight, shot: str, step: int, *, depth: int) -> str:
        """Count a visit of a screen and return its key; write its row if it is new."""
        key = screen_id(sight.application, sight.state.id, has_ended=sight.has_ended)
        if key not in self._depths:
            elements = [] if sight.has_ended else [asdict(element) for element in sight.elements]
            self._connection.execute(
                "INSERT INTO screens VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1, ?)",
                (
                    key,
                    sight.application,
                    sight.state.id,
                    sight.state.route,
                    sight.state.reason,
                    shot,
                    sight.width,
                    sight.height,
                    json.dumps(elements),
                    depth,
                    step,
                    int(sight.has_ended),
                ),
            )
            self._depths[key] = depth
            return key
        self._connection.execute("UPDATE screens SET visits = visits + 1 WHERE id = ?", (key,))
        self._connection.execute(
            "INSERT OR IGNORE INTO merges (step, screen, screenshot, reason) SELECT ?, id, ?, ? "
            "FROM screens WHERE id = ? AND screenshot != ?",
            (step, shot, sight.state.reason, key, shot),
        )
        self._lower(key, depth)
        return key

    def _lower(self, key: str, depth: int) -> None:
        """Lower the depth of a screen that `depth` steps reach, and of the screens behind it."""
        waiting = deque([(key, depth)])
        while waiting:
            key, depth = waiting.popleft()
            if depth >= self._depths[key]:
                continue
            self._depths[key] = depth
            self._connection.execute("UPDATE screens SET depth = ? WHERE id = ?", (depth, key))
            waiting.extend((neighbour, depth + 1) for neighbour in self._next.get(key, ()))

    def _keep(self, image: bytes) -> str:
        """Write a screenshot under the name of its content, completely or not at all; return the name."""
        name = content_hash(image)
        path = self.folder / SCREENS / f"{name}.{image_suffix(image)}"
        if not path.exists():
            draft = path.with_suffix(".draft")
            draft.write_bytes(image)
            draft.replace(path)
        return name

    def _prepare(self) -> None:
        """Make the tables of a new file. Raises RunDirectoryError for a file that is no graph."""
        [[tables]] = self._rows("SELECT COUNT(*) FROM sqlite_master")
        self._rows("PRAGMA journal_mode = WAL")
        self._rows("PRAGMA synchronous = NORMAL")
        if not tables:
            with self._transaction():
                for statement in filter(str.strip, _TABLES.split(";\n")):
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                self._connection.execute(f"PRAGMA user_version = {SCHEMA}")
        super()._prepare()


def read_graph(folder: Path) -> GraphReader:
    """Open a graph for reading, without disturbing a `dart explore` that writes it.

    Raises RunDirectoryError if there is none.
    """
    if not (folder / DATABASE).is_file():
        raise RunDirectoryError(
            f"no exploration in {folder}: {DATABASE} is missing; `dart explore ... --out {folder}` makes one"
        )
    return GraphReader(folder)


def open_graph(folder: Path, settings: ExploreSettings | None = None) -> Graph:
    """Open a graph for writing, or begin one. Without `settings` the folder's settings are kept.

    Raises UserError if the folder holds something else, was explored with other settings, or is in use.
    """
    if settings is None and (folder / SETTINGS).is_file():
        settings = ExploreSettings.model_validate_json((folder / SETTINGS).read_bytes())
    return Graph(folder, settings or ExploreSettings())


def _screen(row: sqlite3.Row) -> Screen:
    values: dict[str, Any] = dict(row)
    elements = tuple(element_from_dict(element) for element in json.loads(values["elements"]))
    has_ended = bool(values.pop("ended"))
    return Screen(**values | {"elements": elements, "has_ended": has_ended})


def _edge(row: sqlite3.Row) -> Edge:
    values: dict[str, Any] = dict(row)
    del values["place"]
    assert values["outcome"] in get_args(Outcome), values
    assert values["action"] in get_args(Operation), values
    return Edge(**values | {"element": element_from_dict(json.loads(values["element"]))})
