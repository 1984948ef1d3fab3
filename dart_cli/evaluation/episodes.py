"""The episodes of one evaluation: a file that is its result so far, and the queue of what is left.

    EpisodeStore   opens it: plan, claim, keep; several processes may have it open at once
    Planned        one episode to play
    Kept           one that was played
    open_episodes  the store of RUN/eval/NAME; an older one of other settings is set aside

RUN/eval/NAME/episodes.sqlite   a row for each episode; an episode is one transaction as it ends, so
                                that a kill loses at most those that were being played
RUN/eval/NAME/players/          a file for each process that plays, locked while it lives: what a dead
                                one had claimed is free again
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bus.endpoints import make_private_dir
from bus.errors import RunDirectoryError, UserError
from dart_cli.evaluation.films import Film, films_dir
from dart_cli.evaluation.results import EpisodeRow, EvalSettings, Mode, differences, eval_dir
from dart_cli.runtime.sqlite_file import SqliteFile

DATABASE, PLAYERS = "episodes.sqlite", "players"
SCHEMA = 1
"""PRAGMA user_version; a file of another one is refused."""

_TABLES = """
CREATE TABLE episodes (
    mode TEXT NOT NULL,
    task TEXT NOT NULL,
    seed INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    composed INTEGER NOT NULL,
    position INTEGER,          -- in the plan; NULL where the newest start does not ask for it
    filmed INTEGER NOT NULL,
    player TEXT,               -- who plays it now
    tries INTEGER NOT NULL DEFAULT 0,
    outcome TEXT,              -- NULL until it is over
    result TEXT,               -- EpisodeRow as JSON
    film TEXT,                 -- Film as JSON
    film_bytes INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (mode, task, seed, attempt)
) WITHOUT ROWID;
CREATE INDEX episodes_by_position ON episodes (position);
CREATE TABLE settings (  -- JSON values
    key TEXT PRIMARY KEY, value TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE times (player TEXT PRIMARY KEY, began REAL NOT NULL, ended REAL NOT NULL) WITHOUT ROWID;
"""

_COUNTED = (  # the fields of Counts
    "COUNT(*) AS total, COUNT(outcome) AS over, COUNT(player) AS playing, "
    "COALESCE(SUM(outcome = 'pass'), 0) AS passed, COALESCE(SUM(outcome = 'invalid'), 0) AS invalid"
)


@dataclass(frozen=True)
class Planned:
    """One episode to play."""

    mode: Mode
    task_id: str
    seed: int
    attempt: int
    composed: bool
    filmed: bool  # whether its screenshots are kept


@dataclass(frozen=True)
class Kept:
    """An episode that is over, and its film where it has one."""

    row: EpisodeRow
    film: Film | None = None
    film_bytes: int = 0  # of its screenshots


@dataclass(frozen=True)
class Counts:
    """How far the plan, or one mode of it, is."""

    total: int
    over: int
    playing: int
    passed: int
    invalid: int


class EpisodeStore(SqliteFile):
    """The episodes of one evaluation. Use as a context manager, from one thread."""

    damaged = "move the folder of the evaluation away"

    def __init__(self, folder: Path) -> None:
        """Open or begin it. Raises RunDirectoryError for a file of another kind or version."""
        self.folder = folder
        make_private_dir(folder)
        make_private_dir(folder / PLAYERS)
        self.player = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._lock = _own_lock(folder / PLAYERS / f"{self.player}.lock")
        self._began = time.time()
        try:
            super().__init__(folder / DATABASE, "rwc")
            self._check()
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Give back what this process did not play, and free the file."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute(
                "UPDATE episodes SET player = NULL WHERE player = ?", (self.player,)
            )
        super().close()
        (self.folder / PLAYERS / f"{self.player}.lock").unlink(missing_ok=True)
        self._lock.close()

    @property
    def settings(self) -> EvalSettings | None:
        """What its episodes depend on; None before the first plan."""
        value = self.value("settings")
        return None if value is None else EvalSettings.model_validate(value)

    def value(self, key: str) -> object:
        """What was kept under a name; None where nothing was."""
        rows = self._rows("SELECT value FROM settings WHERE key = ?", (key,))
        return json.loads(rows[0]["value"]) if rows else None

    def save(self, key: str, value: object) -> None:
        """Keep a value that JSON can hold."""
        with self._transaction():
            self._connection.execute(
                "INSERT OR REPLACE INTO settings (key, value) VALUES (?, ?)",
                (key, json.dumps(value)),
            )

    def others(self) -> list[str]:
        """The other processes that play this evaluation now."""
        files = (self.folder / PLAYERS).glob("*.lock")
        return [path.stem for path in files if path.stem != self.player and _is_held(path)]

    def plan(self, planned: Sequence[Planned]) -> None:
        """Ask for these episodes, in this order. What is over counts, but for invalid ones: played again.

        Where other processes play, their plan must be the same, and invalid episodes stay. Raises UserError.
        """
        keys = [(each.mode, each.task_id, each.seed, each.attempt) for each in planned]
        with self._transaction():
            asked = self._rows(
                "SELECT mode, task, seed, attempt FROM episodes WHERE position IS NOT NULL"
            )
            busy = bool(asked) and bool(self.others())
            if busy and {tuple(row) for row in asked} != set(keys):
                raise UserError(
                    f"{self.folder} is being played by another `dart eval` that asks for other episodes; wait "
                    "for it, give the same options to play along, or choose another --keep-as"
                )
            if busy:
                return
            self._connection.execute("UPDATE episodes SET position = NULL, player = NULL")
            self._connection.executemany(
                "INSERT INTO episodes (mode, task, seed, attempt, composed, position, filmed) "
                "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (mode, task, seed, attempt) DO UPDATE SET "
                "position = excluded.position, filmed = excluded.filmed",
                [
                    (*key, each.composed, place, each.filmed)
                    for place, (key, each) in enumerate(zip(keys, planned, strict=True))
                ],
            )
            self._connection.execute(
                "UPDATE episodes SET outcome = NULL, film = NULL, film_bytes = 0 "
                "WHERE outcome = 'invalid' AND position IS NOT NULL"
            )

    def claim(self, mode: Mode | None = None) -> Planned | None:
        """The next episode that nobody has played or plays, for this process; None where there is none."""
        with self._transaction():
            rows = self._rows(
                "SELECT * FROM episodes WHERE position IS NOT NULL AND outcome IS NULL AND player IS NULL "
                "AND (? IS NULL OR mode = ?) ORDER BY position LIMIT 1",
                (mode, mode),
            )
            for row in rows:
                self._connection.execute(
                    "UPDATE episodes SET player = ?, tries = tries + 1 "
                    "WHERE mode = ? AND task = ? AND seed = ? AND attempt = ?",
                    (self.player, row["mode"], row["task"], row["seed"], row["attempt"]),
                )
                return _planned(row)
        return None

    def keep(self, kept: Kept) -> None:
        """Keep an episode that is over."""
        row, key = kept.row, (kept.row.mode, kept.row.task_id, kept.row.seed, kept.row.attempt)
        where = "WHERE mode = ? AND task = ? AND seed = ? AND attempt = ?"
        film = None if kept.film is None else kept.film.model_dump_json()
        with self._transaction():
            [found] = self._rows(f"SELECT tries FROM episodes {where}", key)  # noqa: S608 - ours
            row = row.model_copy(update={"tries": max(1, found["tries"])})
            self._connection.execute(
                f"UPDATE episodes SET outcome = ?, result = ?, film = ?, film_bytes = ?, player = NULL {where}",  # noqa: S608 - ours
                (row.outcome, row.model_dump_json(), film, kept.film_bytes, *key),
            )
            self._connection.execute(
                "INSERT OR REPLACE INTO times (player, began, ended) VALUES (?, ?, ?)",
                (self.player, self._began, time.time()),
            )

    def release_dead(self) -> None:
        """Free what processes had claimed that are gone."""
        alive = {self.player, *self.others()}
        with self._transaction():
            for row in self._rows("SELECT DISTINCT player FROM episodes WHERE player IS NOT NULL"):
                if row["player"] not in alive:
                    self._connection.execute(
                        "UPDATE episodes SET player = NULL WHERE player = ?", (row["player"],)
                    )

    def counts(self, mode: Mode | None = None) -> Counts:
        """How far the plan is, or one mode of it."""
        [row] = self._rows(
            f"SELECT {_COUNTED} FROM episodes "  # noqa: S608
            "WHERE position IS NOT NULL AND (? IS NULL OR mode = ?)",
            (mode, mode),
        )
        return Counts(**dict(row))

    def counts_by_part(self, mode: Mode | None = None) -> dict[tuple[Mode, bool], Counts]:
        """The same for each mode's tasks and, under True, for its compositions, in the order of the plan."""
        rows = self._rows(
            f"SELECT mode, composed, {_COUNTED} FROM episodes "  # noqa: S608
            "WHERE position IS NOT NULL AND (? IS NULL OR mode = ?) "
            "GROUP BY mode, composed ORDER BY MIN(position)",
            (mode, mode),
        )
        found = {}
        for row in map(dict, rows):
            part = row.pop("mode"), bool(row.pop("composed"))
            found[part] = Counts(**row)
        return found

    def rows(self, mode: Mode) -> list[EpisodeRow]:
        """The planned episodes of one mode that are over, in the order of the plan."""
        rows = self._rows(
            "SELECT result FROM episodes WHERE position IS NOT NULL AND outcome IS NOT NULL AND mode = ? "
            "ORDER BY position",
            (mode,),
        )
        return [EpisodeRow.model_validate_json(row["result"]) for row in rows]

    def films(self) -> list[Film]:
        """The films of the planned episodes, in the order of the plan."""
        rows = self._rows(
            "SELECT film FROM episodes WHERE position IS NOT NULL AND film IS NOT NULL ORDER BY position"
        )
        return [Film.model_validate_json(row["film"]) for row in rows]

    def film_bytes(self) -> int:
        """Bytes of the screenshots that are kept."""
        [row] = self._rows("SELECT COALESCE(SUM(film_bytes), 0) AS bytes FROM episodes")
        return int(row["bytes"])

    def wall_s(self) -> float:
        """Seconds in which at least one process played, over all starts."""
        total, until = 0.0, 0.0
        for row in self._rows("SELECT began, ended FROM times ORDER BY began"):
            total += max(0.0, row["ended"] - max(until, row["began"]))
            until = max(until, row["ended"])
        return total

    def _check(self) -> None:
        """Make the tables of a new file; refuse one that is not ours."""
        with self._transaction():
            [[version]] = self._rows("PRAGMA user_version")
            if version == 0 and not self._rows("SELECT 1 FROM sqlite_master LIMIT 1"):
                for statement in filter(str.strip, _TABLES.split(";\n")):
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA user_version = {SCHEMA}")
            elif version != SCHEMA:
                raise RunDirectoryError(
                    f"{self._path} has schema {version}, this dart reads {SCHEMA}; remove {self.folder}"
                )


def open_episodes(
    run_dir: Path, name: str, settings: EvalSettings, *, fresh: bool = False
) -> tuple[EpisodeStore, str]:
    """The store of an evaluation, and what to tell of an older one; empty where it goes on.

    One of other settings, or with `fresh` any, is set aside with its result and films as NAME.1, NAME.2,
    ... Raises UserError where another process plays it now.
    """
    folder = eval_dir(run_dir) / name
    told = ""
    if (folder / DATABASE).is_file():
        with EpisodeStore(folder) as store:
            why = "--fresh" if fresh else _difference(settings, store.settings)
            busy = store.others()
        if why and busy:
            raise UserError(
                f"{folder} is being played by another `dart eval` with other settings ({why}); wait for it, "
                "or choose another --keep-as"
            )
        told = _set_aside(run_dir, name, why) if why else ""
    elif (eval_dir(run_dir) / f"{name}.json").is_file():
        told = _set_aside(run_dir, name, "it has no single episodes to go on from")
    store = EpisodeStore(folder)
    store.save("settings", settings.model_dump(mode="json"))
    return store, told


def _set_aside(run_dir: Path, name: str, why: str) -> str:
    """Rename an older evaluation; what to tell of it."""
    number = 1
    while any((eval_dir(run_dir)).glob(f"{name}.{number}*")):
        number += 1
    other = f"{name}.{number}"
    for before, after in (
        (eval_dir(run_dir) / f"{name}.json", eval_dir(run_dir) / f"{other}.json"),
        (films_dir(run_dir, name), films_dir(run_dir, other)),
        (eval_dir(run_dir) / name, eval_dir(run_dir) / other),
    ):
        if before.exists():
            before.rename(after)
    return f"{eval_dir(run_dir) / name} begins anew ({why}); the older one is kept as {other}"


def _difference(now: EvalSettings, before: EvalSettings | None) -> str:
    """The first thing that differs, in words; empty for none."""
    for name, was, is_now in differences(before, now) if before else ():
        if name in ("suite", "model", "weights"):
            return f"another {name}"
        return f"{name} was {was!r} and is {is_now!r}"
    return ""


def _planned(row: sqlite3.Row) -> Planned:
    return Planned(
        mode=row["mode"],
        task_id=row["task"],
        seed=row["seed"],
        attempt=row["attempt"],
        composed=bool(row["composed"]),
        filmed=bool(row["filmed"]),
    )


def _own_lock(path: Path) -> IO[bytes]:
    """A new file, locked as long as it is open."""
    while True:
        file = path.open("wb")
        fcntl.flock(file, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):  # removed before it was locked: see _is_held
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        file.close()


def _is_held(path: Path) -> bool:
    """Whether the process that has this file lives; the file of a dead one is removed."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except BlockingIOError:
        return True
    except OSError:  # it has just ended
        return False
    return False
