"""The episodes of one evaluation: its plan, and what is over of it, line by line.

    Plan           the tasks of an evaluation and their episodes in order; plan_of, what a configuration asks for
    KeptEpisodes   the folder RUN/eval/NAME: what is over, what is left for this process
    evaluation_of  scores, protocol, notes and all episodes as one Evaluation
    Part           a share of the plan: every N-th episode, for a process of its own

RUN/eval/NAME/settings.json        what the episodes depend on
RUN/eval/NAME/episodes-1-of-1.jsonl   a line for each episode as it ends, so that a kill loses at most those
                                   that were being played; a file for each part
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter

from bus.endpoints import make_private_dir
from bus.errors import TaskError
from dart_cli.config.schema import TRAIN_SEEDS, Config
from dart_cli.config.task_split import composed_tasks, trained_tasks
from dart_cli.evaluation.films import Film, films_dir
from dart_cli.evaluation.protocols import check, protocol_of
from dart_cli.evaluation.results import (
    SCHEMA,
    EpisodeRow,
    EvalSettings,
    Evaluation,
    Mode,
    eval_dir,
)
from dart_cli.evaluation.scores import METHOD, mode_score
from dart_cli.player.episodes import plan_episodes
from dart_cli.runtime.work_folder import KeptFolder, KeptLines, StoredModel, read_lines
from envs.contract.base import Task

FILMS_PER_TASK = 3
"""Episodes of each task whose screenshots are kept: the first ones."""
RANDOM_EPISODES = 100
"""Of random clicks, at most, where nothing else is asked for: a baseline needs no narrower interval."""

Key = tuple[Mode, str, int, int]


@dataclass(frozen=True)
class Planned:
    """One episode to play."""

    mode: Mode
    task_id: str
    seed: int
    attempt: int
    composed: bool
    filmed: bool  # whether its screenshots are kept

    @property
    def key(self) -> Key:
        """The same for each try of it."""
        return self.mode, self.task_id, self.seed, self.attempt


@dataclass(frozen=True)
class Plan:
    """What an evaluation plays."""

    trained: list[Task]  # on held-out seeds
    composed: list[Task]  # never trained on
    modes: Sequence[Mode]
    episodes: list[Planned]

    @property
    def by_id(self) -> dict[str, Task]:
        """The tasks by id, with the steps that the evaluation gives them."""
        return {task.id: task for task in (*self.trained, *self.composed)}

    def count(self, mode: Mode) -> int:
        """Instances (task and seed) of a mode, of the kind of task that has more."""
        first = [each for each in self.episodes if each.mode == mode and not each.attempt]
        composed = sum(each.composed for each in first)
        return max(composed, len(first) - composed)


def plan_of(
    config: Config, tasks: Sequence[str], modes: Sequence[Mode], episodes: int | None = None
) -> Plan:
    """Return the episodes of each mode in turn, attempt by attempt; `episodes` in place of eval.episodes.

    A protocol's step limit and number of instances hold. Raises TaskError where there is none.
    """
    limit = step_limit(config)
    parts = [
        [replace(task, max_steps=limit) if limit else task for task in found]
        for found in (trained_tasks(config, tasks), composed_tasks(config, tasks))
    ]
    protocol = protocol_of(config)
    per_task = protocol.per_task if protocol and episodes is None else 0
    asked = config.eval.episodes if episodes is None else episodes
    if not (per_task or asked) or not any(parts):
        raise TaskError("nothing to evaluate: set eval.episodes >= 1 and name a task")
    filmed = next((mode for mode in reversed(modes) if mode != "random"), modes[-1])

    def of_mode(mode: Mode) -> Iterator[Planned]:
        most = RANDOM_EPISODES if mode == "random" and episodes is None else asked
        for attempt in range(attempts_of(config, mode)):
            first = TRAIN_SEEDS
            for composed, found in enumerate(parts):
                count = per_task * len(found) or min(asked, most)
                for index, each in enumerate(plan_episodes(found, count, first)):
                    shown = mode == filmed and not attempt and index < FILMS_PER_TASK * len(found)
                    key = mode, each.task.id, each.seed, attempt
                    yield Planned(*key, composed=bool(composed), filmed=shown)
                first += count if per_task else asked

    every = [each for mode in modes for each in of_mode(mode)]
    return Plan(trained=parts[0], composed=parts[1], modes=modes, episodes=every)


def attempts_of(config: Config, mode: Mode) -> int:
    """Episodes of each instance; a greedy policy would repeat itself."""
    return 1 if mode == "greedy" else config.eval.attempts


def step_limit(config: Config) -> int:
    """Return the step limit of every episode, by the protocol; 0 for each task's own."""
    protocol = protocol_of(config)
    return min(protocol.max_steps) if protocol and protocol.max_steps != "task" else 0


# --- what is over ----------------------------------------------------------------------------


class Kept(StoredModel):
    """An episode that is over, and its film where it has one."""

    row: EpisodeRow
    film: Film | None = None
    film_bytes: int = 0  # of its screenshots
    ended_at: float = 0.0  # unix seconds


@dataclass(frozen=True)
class Counts:
    """How far the plan, or a part of it, is."""

    total: int
    over: int
    passed: int
    invalid: int


@dataclass(frozen=True)
class Part:
    """Every `count`-th episode of a plan, from `number` on, counted from 1."""

    number: int = 1
    count: int = 1

    @property
    def file(self) -> str:
        """Its lines."""
        return f"episodes-{self.number}-of-{self.count}.jsonl"


WHOLE = Part()


class KeptEpisodes:
    """The episodes of RUN/eval/NAME. Use as a context manager."""

    def __init__(
        self,
        run_dir: Path,
        name: str,
        settings: EvalSettings,
        plan: Plan,
        part: Part | None = WHOLE,
        *,
        fresh: bool = False,
    ) -> None:
        """Begin, or go on: what is over counts, but for invalid episodes, which are played again.

        An older evaluation of other settings, or with `fresh` any, is set aside with its result and films as
        NAME.1, NAME.2, ... Without a `part` nothing is played here. Raises UserError where another process has
        the folder, or the part.
        """
        make_private_dir(eval_dir(run_dir))
        self.plan, self.settings = plan, settings
        self.folder = eval_dir(run_dir) / name
        self._kept = KeptFolder(
            self.folder, settings, fresh=fresh, aside=True, shared=part != WHOLE
        )
        self.told = ""  # of an older one
        if (moved := self._kept.moved) is not None:
            for before, after in (
                (f"{name}.json", eval_dir(run_dir) / f"{moved.name}.json"),
                (films_dir(run_dir, name).name, films_dir(run_dir, moved.name)),
            ):
                if (eval_dir(run_dir) / before).exists():
                    (eval_dir(run_dir) / before).rename(after)
            self.told = f"{self.folder} begins anew ({self._kept.why}); the older one is kept as {moved.name}"
        self._by_key: dict[Key, list[Kept]] = {}
        self._read: dict[Path, int] = {}  # bytes so far, of each part's file
        self._own: KeptLines[Kept] | None = None
        try:
            if part is not None:
                self._own = KeptLines(self.folder / part.file, TypeAdapter(Kept), self._kept.busy)
            self.refresh()
        except BaseException:
            self.close()
            raise
        share = plan.episodes[part.number - 1 :: part.count] if part else []
        self._before = {
            key: len(tries)
            for key, tries in self._by_key.items()
            if tries[-1].row.outcome == "invalid"
        }
        self.left = [each for each in share if not self._is_over(each)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the folder."""
        if self._own is not None:
            self._own.close()
        self._kept.close()

    def keep(self, kept: Kept) -> None:
        """Keep an episode of this process that is over."""
        assert self._own is not None
        row = kept.row
        tries = len(self._by_key.get((row.mode, row.task_id, row.seed, row.attempt), ())) + 1
        kept = kept.model_copy(update={"row": row.model_copy(update={"tries": tries})})
        self._own.add(kept)
        self._read[self._own.path] = self._own.size
        self._note(kept)

    def refresh(self) -> None:
        """Read what was kept since, by any process."""
        for path in sorted(self.folder.glob("episodes-*.jsonl")):
            known = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(known)
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._read[path] = known + len(whole)
            for kept in read_lines(path, TypeAdapter(Kept), whole):
                self._note(kept)

    def _note(self, kept: Kept) -> None:
        row = kept.row
        key = row.mode, row.task_id, row.seed, row.attempt
        self._by_key.setdefault(key, []).append(kept)

    def _is_over(self, each: Planned) -> bool:
        return len(self._by_key.get(each.key, ())) > self._before.get(each.key, 0)

    @property
    def over(self) -> list[Kept]:
        """The newest try of each planned episode that is over, in the order of the plan."""
        return [self._by_key[each.key][-1] for each in self.plan.episodes if self._is_over(each)]

    def counts(self, mode: Mode | None = None, *, composed: bool | None = None) -> Counts:
        """How far the plan is, or a part of it."""
        some = [
            each
            for each in self.plan.episodes
            if mode in (None, each.mode) and composed in (None, each.composed)
        ]
        outcomes = [self._by_key[each.key][-1].row.outcome for each in some if self._is_over(each)]
        passed, invalid = outcomes.count("pass"), outcomes.count("invalid")
        return Counts(len(some), len(outcomes), passed, invalid)

    def counts_by_part(self, mode: Mode | None = None) -> dict[tuple[Mode, bool], Counts]:
        """Return the counts of each mode's tasks and, under True, compositions, in the order of the plan."""
        parts = dict.fromkeys((e.mode, e.composed) for e in self.plan.episodes)
        return {
            (each, composed): self.counts(each, composed=composed)
            for each, composed in parts
            if mode in (None, each)
        }

    def rows(self, mode: Mode) -> list[EpisodeRow]:
        """Return the planned episodes of one mode that are over, in the order of the plan."""
        return [kept.row for kept in self.over if kept.row.mode == mode]

    def films(self) -> list[Film]:
        """Return the films of the planned episodes, in the order of the plan."""
        return [kept.film for kept in self.over if kept.film is not None]

    def film_bytes(self) -> int:
        """Bytes of the screenshots that are kept."""
        return sum(kept.film_bytes for tries in self._by_key.values() for kept in tries)

    def wall_s(self) -> float:
        """Seconds in which at least one episode was played, over all starts."""
        every = [kept for tries in self._by_key.values() for kept in tries]
        total, until = 0.0, 0.0
        for began, ended in sorted(
            (each.ended_at - each.row.wall_s, each.ended_at) for each in every
        ):
            total += max(0.0, ended - max(until, began))
            until = max(until, ended)
        return total


# --- the result ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """The weights that are played."""

    directory: Path | None  # None for the model as it comes
    version: int  # -1 likewise


def evaluation_of(
    config: Config, kept: KeptEpisodes, chosen: Chosen, *, dart: str, left_out: Mapping[str, str]
) -> Evaluation:
    """All episodes of the plan, which are over, as one result."""
    plan = kept.plan
    trained = [task.id for task in plan.trained]
    composed = [task.id for task in plan.composed]
    rows = {mode: kept.rows(mode) for mode in plan.modes}
    every = [row for part in rows.values() for row in part]
    limits = [task.max_steps for task in plan.by_id.values()]
    return Evaluation(
        schema_version=SCHEMA,
        name=kept.folder.name,
        model=config.model.path,
        weights=str(chosen.directory or ""),
        policy_version=chosen.version,
        seed=TRAIN_SEEDS,
        wall_s=kept.wall_s(),
        modes={
            mode: mode_score(part, trained, composed, config.eval.attempts)
            for mode, part in rows.items()
        },
        attempts=config.eval.attempts,
        settings=kept.settings,
        protocol=check(config, every, limits),
        dart=dart,
        finished_at=time.time(),
        interval_method=METHOD,
        left_out=dict(left_out),
        notes=list(_notes(every, chosen.version)),
        episodes=every,
    )


def _notes(rows: Sequence[EpisodeRow], policy_version: int) -> Iterator[str]:
    versions = {version for row in rows if row.mode != "random" for version in row.versions}
    if versions - {policy_version}:
        told = ", ".join(f"v{each}" for each in sorted(versions))
        yield f"weights of several versions have answered ({told}): these scores are of none of them"
    again = sum(row.tries > 1 for row in rows)
    if again:
        yield f"{again} episodes were played again, as earlier starts left them invalid"
