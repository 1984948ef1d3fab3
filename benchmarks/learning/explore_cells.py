"""One cell of explore_effect.py: an instance explored by one chooser, tuned on, tested.

Application   what is explored; APPLICATIONS, MEASURED
PRACTISED     arms that go on by reinforcement learning (explore_practice.py)
Protocol      steps, updates and rate; PROTOCOL, fixed on `centre`
Effect        the study in one application; `play` measures a cell
questions_of     questions from the rows of several explorations
asked_apart   a question in other words than a row's
"""

from __future__ import annotations

import hashlib
import json
import re
import resource
import shutil
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.learning.explore_practice import PRACTICE, practised
from benchmarks.learning.study import Cell, Result, call, dart, overrides
from bus.errors import UserError
from dart_cli.explore.graph import read_graph
from dart_cli.explore.options import RowOptions
from dart_cli.explore.rows import make_rows
from dart_cli.policy.pointer.folder import add_pointer
from envs.contract.base import Task
from envs.contract.registry import select_tasks

Row = dict[str, Any]

CHOOSERS = ("q", "count", "recency", "random")
PRACTISED = {"practised-q": "q", "practised-untuned": "untuned"}
"""Arm -> the arm whose model it begins with."""
LONG_SEED = 1_000
"""Of the draws of the explorations that the questions come from, counted on; those of the arms are the instance's."""
PER_SCREEN = 8
"""Questions of a screen, at most."""
ALL_ROWS = RowOptions(test_share=0.0, per_element=0, per_screen=0)


@dataclass(frozen=True)
class Application:
    """An application to explore."""

    suite: str
    tasks: str  # pattern
    pages: bool = False  # its suite keeps pages in a folder


APPLICATIONS: Mapping[str, Application] = {
    "centre": Application("apps", "apps/centre-*"),
    "mail": Application("apps", "apps/mail-*"),
    "shop": Application("apps", "apps/shop-*"),
    "wiki": Application("benchmarks.learning.wiki:WikiSuite", "wiki/look", pages=True),
    "settings": Application("desk", "desk/settings-*"),
    "files": Application("desk", "desk/files-*"),
}
MEASURED = ("mail", "shop", "wiki")
"""Without `centre`, on which the protocol was fixed, and those of WARMING."""
WARMING = ("settings", "files")
"""What the model that all arms begin with has learned to point at."""


@dataclass(frozen=True)
class Protocol:
    """What is the same for all arms, instances and applications."""

    steps: int = 75  # of an arm's exploration
    updates: int = 560
    batch: int = 8
    lr: float = 1.5e-3
    base_seconds: float = 40.0  # CPU, of the base that knows words and no places
    warm_updates: int = 380  # on the rows of WARMING, a fifth of them of the head alone
    most_pixels: int = 37_632  # of a screenshot as the model sees it: 224x168


LONG = 2
"""Steps of each exploration that the questions come from, times those of an arm."""

WARM_INSTANCES = 2
"""Of each application of WARMING."""
POINTING = 'policy.pointing="pointer"'

PROTOCOL = Protocol()
"""Fixed on `centre`: hit@1 is flat from `updates` on, and after `steps` random clicks have not yet seen all of it."""


class Effect:
    """The study in one application."""

    def __init__(self, root: Path, work: Path, name: str, protocol: Protocol = PROTOCOL) -> None:
        self.name = name
        self.application = APPLICATIONS[name]
        self.protocol = protocol
        self._root = root
        self._work = work.absolute()

    def settings(self, cell: Cell) -> object:
        """Return what a cell's result depends on."""
        found = {**asdict(self.application), **asdict(self.protocol)}
        return found | {"practice": asdict(PRACTICE)} if cell.arm in PRACTISED else found

    def folder(self, *parts: str) -> Path:
        """Return a folder below the application's."""
        return (self._work / self.name).joinpath(*parts)

    def play(self, cell: Cell) -> Result:
        """Measure one cell; what it needs is made if it is not there. Raises ChildError, UserError."""
        if cell.arm in PRACTISED:
            return self._practised(cell)
        test = self._test(cell)
        spent = _cpu_s()
        model, told, rows = str(self._ground()), {}, []
        if cell.arm != "untuned":
            folder = self._rows(self._explored(cell, self.protocol.steps, cell.seed))
            rows = read_rows(folder)
            model, told = self._tuned(cell, folder, len(rows))
        return {
            **told,
            "rows": len(rows),
            "screens": len({row["screen_id"] for row in rows}),
            "covered": self._coverage(cell) if cell.arm != "untuned" else None,
            "hits": self._hits(cell, model, test, rows),
            "cpu_s": round(_cpu_s() - spent, 1),
        }

    def _practised(self, cell: Cell) -> Result:
        """Reinforcement learning in the instance."""
        arm, model = Cell(PRACTISED[cell.arm], cell.seed), str(self._ground())
        if arm.arm != "untuned":
            folder = self._rows(self._explored(arm, self.protocol.steps, cell.seed))
            model, _ = self._tuned(arm, folder, len(read_rows(folder)))
        longer = LONG * self.protocol.steps
        graph = self._explored(Cell("q", cell.seed), longer, LONG_SEED + cell.seed)
        return practised(
            self._root,
            self.folder(),
            cell.arm,
            cell.seed,
            graph=graph,
            model=model,
            practice=PRACTICE,
        )

    # --- exploring and rows ----------------------------------------------------------------------

    def _task(self, instance: int) -> Task:
        tasks = select_tasks(self.application.suite, [self.application.tasks])
        tasks = [each for each in tasks if each.split == "train"]
        return tasks[instance % len(tasks)]

    def _explored(self, cell: Cell, steps: int, draws: int) -> Path:
        """Return a graph of the cell's instance by the chooser that is its arm, made where it is not there."""
        out = self._graph(cell, draws)
        asked = ["--task", self._task(cell.seed).id, "--first-seed", str(cell.seed)]
        asked += ["--app", self.name, "--chooser", cell.arm, "--steps", str(steps)]
        asked += ["--seed", str(draws), "--out", str(out)]
        if self.application.pages:
            asked += ["--option", f"pages={self._work / 'pages'}"]
        call([*dart("explore", self.application.suite), *asked], self._log(cell), self._root)
        return out

    def _graph(self, cell: Cell, draws: int) -> Path:
        return self.folder("explored", f"{cell.name}-{draws}")

    def _rows(self, graph: Path) -> Path:
        """All rows of a graph, a set."""
        out = self.folder("rows", graph.name)
        if not out.exists():
            draft = _draft(out)
            with read_graph(graph) as opened:
                make_rows(opened, draft, ALL_ROWS)
            draft.rename(out)
        return out / "train"

    def _test(self, cell: Cell) -> Path:
        """Return the questions of an instance, the same for all its arms."""
        out = self.folder("rows", f"test-{cell.seed}")
        if not out.exists():
            draft, parts = _draft(out), []
            for chooser in CHOOSERS:
                arm = Cell(chooser, cell.seed)
                graph = self._explored(arm, LONG * self.protocol.steps, LONG_SEED + cell.seed)
                folder = self._rows(graph)
                parts.append(read_rows(folder))
                shutil.copytree(folder, draft, dirs_exist_ok=True)
            rows_file(draft).write_text(json.dumps(questions_of(parts)), encoding="utf-8")
            draft.rename(out)
        return out

    def _coverage(self, cell: Cell) -> float:
        """Return the share of the union's elements that the arm's screens show."""
        union = set()
        for chooser in CHOOSERS:
            union |= _elements(self._graph(Cell(chooser, cell.seed), LONG_SEED + cell.seed))
        return round(len(union & _elements(self._graph(cell, cell.seed))) / len(union), 4)

    # --- tuning and hits -------------------------------------------------------------------------

    def _ground(self) -> Path:
        """Return the model that all arms begin with: it points, and has seen none of the applications."""
        out = self._work / "ground"
        if not out.exists():
            cell, rows = Cell("ground", 0), []
            for name in WARMING:
                warming = Effect(self._root, self._work, name, self.protocol)
                for instance in range(WARM_INSTANCES):
                    arm = Cell("count", instance)
                    rows.append(
                        warming._rows(warming._explored(arm, self.protocol.steps, instance))
                    )
            head = self._headed()
            self._tune(cell, rows, head, out, self.protocol.warm_updates, head_share=0.2)
        return out

    def _headed(self) -> Path:
        """Return a base that knows words and no places, shown small screenshots, with a pointer head."""
        out, base = self._work / "headed", self._work / "base"
        if not base.exists():
            script = [
                sys.executable,
                str(self._root / "benchmarks" / "learning" / "pointer_base.py"),
            ]
            sizes = ["--seed", "0", "--seconds", str(self.protocol.base_seconds)]
            call([*script, *sizes, "--out", str(base)], self._log(Cell("base", 0)), self._root)
        if not out.exists():
            draft = _draft(out)
            add_pointer(base, draft, 0)
            file = draft / "preprocessor_config.json"
            told = json.loads(file.read_text(encoding="utf-8"))
            told["size"]["longest_edge"] = self.protocol.most_pixels
            file.write_text(json.dumps(told, indent=1), encoding="utf-8")
            draft.rename(out)
        return out

    def _tuned(self, cell: Cell, rows: Path, count: int) -> tuple[str, Result]:
        if not count:
            raise UserError(f"{cell.name} of {self.name} has no rows; explore further")
        out = self.folder("models", cell.name)
        if not out.exists():
            self._tune(cell, [rows], self._ground(), out, self.protocol.updates)
        record = json.loads((out / "tune.json").read_text(encoding="utf-8"))
        return str(out), {name: record[name] for name in ("updates", "seconds", "examples")}

    def _tune(
        self,
        cell: Cell,
        rows: Sequence[Path],
        model: Path,
        out: Path,
        updates: int,
        *,
        head_share: float = 0.0,
    ) -> None:
        """`dart tune` for so many updates."""
        batch, count = self.protocol.batch, sum(len(read_rows(each)) for each in rows)
        sets = [f"tune.batch={batch}", f"tune.lr={self.protocol.lr}", "tune.held_out=0"]
        sets += [f"tune.epochs={updates * batch / count}", f"run.seed={cell.seed}"]
        sets += [f"tune.head_share={head_share}", POINTING]
        places = [word for each in rows for word in ("--data", str(each))]
        places += ["--model", str(model), "--out", str(out)]
        call([*dart("tune"), *places, "--json", *overrides(sets)], self._log(cell), self._root)

    def _hits(self, cell: Cell, model: str, test: Path, rows: Sequence[Row]) -> Result:
        out = self.folder("evaluations", cell.name)
        asked = ["--model", model, "--out", str(out), "--misses", "0", "--json"]
        asked += overrides([POINTING])
        command = [*dart("eval", "grounding", str(test)), *asked]
        told = call(command, self._log(cell), self._root)
        hits = {key: each["hit_1"] for key, each in told["by"]["application"].items()}
        return {
            "screens": hits,
            "by_query": {key: each["hit_1"] for key, each in told["by"]["query"].items()},
            "known": known_as(read_rows(test), rows),
            "n": told["n"],
            "chance": told["chance"],
        }

    def _log(self, cell: Cell) -> Path:
        return self.folder("logs", f"{cell.name}.log")


def questions_of(parts: Sequence[Sequence[Row]]) -> list[Row]:
    """Questions from the rows of several explorations of one instance.

    Of each screen one picture is asked about, drawn by its name; a question with two answers is left out. The
    key `application` is the screen, so that hits are told by screen.
    """
    pictures: dict[str, set[str]] = defaultdict(set)
    for row in (row for part in parts for row in part):
        pictures[row["screen_id"]].add(row["img_filename"])
    chosen = {screen: min(found, key=_digest) for screen, found in pictures.items()}
    answers: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for row in (row for part in parts for row in part):
        if chosen[row["screen_id"]] == row["img_filename"]:
            words = asked_apart(row["instruction"])
            made = row | {"instruction": words, "application": row["screen_id"]}
            answers[row["screen_id"], words][json.dumps(row["bbox"])] = made
    found: dict[str, list[Row]] = defaultdict(list)
    for (screen, _), same in sorted(answers.items(), key=lambda each: _digest(str(each[0]))):
        if len(same) == 1 and len(found[screen]) < PER_SCREEN:
            found[screen] += same.values()
    return [row for screen in sorted(found) for row in found[screen]]


_APART = (
    (re.compile(r'^(?:click|open) ((?:the )?".*)$'), r"press \1"),
    (re.compile(r'^go to (".*")$'), r"open the page \1"),
    (re.compile(r'^show (".*")$'), r"let me see \1"),
    (re.compile(r'^make (".*") go away$'), r"hide \1"),
)


def asked_apart(query: str) -> str:
    """Return a row's query (dart_cli/explore/phrasing.py) in other words. Raises UserError for one of another kind."""
    for pattern, words in _APART:
        if pattern.match(query):
            return pattern.sub(words, query)
    raise UserError(f"{query!r} is no query that dart explore rows writes; add it to _APART")


def known_as(test: Sequence[Row], rows: Sequence[Row]) -> dict[str, str]:
    """Screen of the test -> how the arm's rows have it: `covered`, `another_state`, `never_seen`."""
    pictures = {row["img_filename"] for row in rows}
    screens = {row["screen_id"] for row in rows}
    found = {}
    for row in test:
        is_known = "another_state" if row["screen_id"] in screens else "never_seen"
        found[row["screen_id"]] = "covered" if row["img_filename"] in pictures else is_known
    return found


def read_rows(folder: Path) -> list[Row]:
    """Return the rows of a set."""
    rows: list[Row] = json.loads(rows_file(folder).read_text(encoding="utf-8"))
    return rows


def rows_file(folder: Path) -> Path:
    """Return the file of a set's rows, whose name tells the kind of device."""
    return next(folder.glob("screenspot_*.json"))


def _elements(graph: Path) -> set[tuple[str, str]]:
    """Return what its screens show that can be acted on: screen and place."""
    with read_graph(graph) as opened:
        return {
            (screen.id, element.place)
            for screen in opened.screens()
            for element in screen.elements
            if not screen.has_ended
        }


def _draft(out: Path) -> Path:
    """Return the name of a folder that is not whole yet; what an earlier start left is removed."""
    draft = out.with_name(f"{out.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.parent.mkdir(parents=True, exist_ok=True)
    return draft


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _cpu_s() -> float:
    """CPU seconds of the processes that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime
