"""The episodes of one evaluation: the plan, and the folder in which finished episodes are kept.

    Plan           the tasks of an evaluation and their episodes in order; plan_of makes it
    Planned        one episode of the plan
    Part           a share of the plan for one process: every N-th episode
    EpisodeFolder  the folder RUN/eval/NAME: the finished episodes, and those that are left for this process
    EpisodeRecord  one finished episode
    evaluation_of  all episodes with scores, protocol and notes as one Evaluation

RUN/eval/NAME/settings.json           the settings on which the outcomes depend
RUN/eval/NAME/episodes-1-of-1.jsonl   a line for each episode, written when it ends, so that a kill loses only
                                      the episodes in play; each part has a file
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
from dart_cli.config.task_split import trained_tasks, untrained_tasks
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
from dart_cli.runtime.work_folder import JsonLines, StoredModel, WorkFolder, read_lines
from envs.contract.base import Task

FILMS_PER_TASK = 3
"""Episodes of each task whose screenshots are kept: the first ones."""
RANDOM_EPISODES = 100
"""Episodes of random clicks by default, at most: a baseline does not need a narrower interval."""

Key = tuple[Mode, str, int, int]
"""Mode, task id, seed and attempt of an episode."""


@dataclass(frozen=True)
class Planned:
    """One episode to play."""

    mode: Mode
    task_id: str
    seed: int
    attempt: int
    heldout: bool  # whether its task is never trained on
    filmed: bool  # whether its screenshots are kept

    @property
    def key(self) -> Key:
        """The key of the episode, which all of its tries share."""
        return self.mode, self.task_id, self.seed, self.attempt


@dataclass(frozen=True)
class Plan:
    """The tasks and episodes that an evaluation plays."""

    trained: list[Task]  # on held-out seeds
    heldout: list[Task]  # never trained on
    modes: Sequence[Mode]
    episodes: list[Planned]

    @property
    def by_id(self) -> dict[str, Task]:
        """Task id -> task, with the step limit of the evaluation."""
        return {task.id: task for task in (*self.trained, *self.heldout)}

    def count(self, mode: Mode) -> int:
        """Return the larger number of instances (task and seed) of a mode: of trained tasks, or of others."""
        instances = [row for row in self.episodes if row.mode == mode and not row.attempt]
        heldout = sum(row.heldout for row in instances)
        return max(heldout, len(instances) - heldout)


def plan_of(
    config: Config, tasks: Sequence[str], modes: Sequence[Mode], episodes: int | None = None
) -> Plan:
    """Return the plan of a configuration: the episodes of each mode in turn, attempt by attempt.

    `episodes` replaces eval.episodes. A protocol sets the step limit and the number of instances. Raises
    TaskError if there is no episode to play.
    """
    limit = step_limit(config)
    parts = [
        [replace(task, max_steps=limit) if limit else task for task in part]
        for part in (trained_tasks(config, tasks), untrained_tasks(config, tasks))
    ]
    protocol = protocol_of(config)
    per_task = protocol.per_task if protocol and episodes is None else 0
    per_mode = config.eval.episodes if episodes is None else episodes
    if not (per_task or per_mode) or not any(parts):
        raise TaskError("nothing to evaluate: set eval.episodes >= 1 and name a task")
    filmed_mode = next((mode for mode in reversed(modes) if mode != "random"), modes[-1])

    def of_mode(mode: Mode) -> Iterator[Planned]:
        most = RANDOM_EPISODES if mode == "random" and episodes is None else per_mode
        for attempt in range(attempts_of(config, mode)):
            first = TRAIN_SEEDS
            for heldout, part in enumerate(parts):
                count = per_task * len(part) or min(per_mode, most)
                for index, episode in enumerate(plan_episodes(part, count, first)):
                    is_early = index < FILMS_PER_TASK * len(part)
                    yield Planned(
                        mode=mode,
                        task_id=episode.task.id,
                        seed=episode.seed,
                        attempt=attempt,
                        heldout=bool(heldout),
                        filmed=mode == filmed_mode and not attempt and is_early,
                    )
                first += count if per_task else per_mode

    all_episodes = [episode for mode in modes for episode in of_mode(mode)]
    return Plan(trained=parts[0], heldout=parts[1], modes=modes, episodes=all_episodes)


def attempts_of(config: Config, mode: Mode) -> int:
    """Return the number of attempts at each instance: 1 for a greedy policy, which would repeat itself."""
    return 1 if mode == "greedy" else config.eval.attempts


def step_limit(config: Config) -> int:
    """Return the step limit of the protocol for every episode; 0 if each task has its own."""
    protocol = protocol_of(config)
    return min(protocol.max_steps) if protocol and protocol.max_steps != "task" else 0


# --- finished episodes -----------------------------------------------------------------------


class EpisodeRecord(StoredModel):
    """A finished episode, with its film if it has one."""

    row: EpisodeRow
    film: Film | None = None
    film_bytes: int = 0  # of its screenshots
    ended_at: float = 0.0  # unix seconds


@dataclass(frozen=True)
class Counts:
    """The progress of a plan, or of a part of it, in episodes."""

    total: int
    over: int
    passed: int
    invalid: int


@dataclass(frozen=True)
class Part:
    """A part of a plan: every `count`-th episode, from the `number`-th on, counted from 1."""

    number: int = 1
    count: int = 1

    @property
    def file(self) -> str:
        """The name of the file with its episodes."""
        return f"episodes-{self.number}-of-{self.count}.jsonl"


WHOLE = Part()


class EpisodeFolder:
    """The episodes of an evaluation in the folder RUN/eval/NAME. Use as a context manager."""

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
        """Start an evaluation, or go on with it: finished episodes count, and invalid ones are played again.

        An older evaluation with other settings (with `fresh`, any older evaluation) is set aside as NAME.1,
        NAME.2, ..., with its result and films. If `part` is None, this process plays nothing. Raises
        UserError if another process has the folder or the part.
        """
        make_private_dir(eval_dir(run_dir))
        self.plan, self.settings = plan, settings
        self.folder = eval_dir(run_dir) / name
        self._work_folder = WorkFolder(
            self.folder, settings, fresh=fresh, aside=True, shared=part != WHOLE
        )
        self.set_aside = ""  # a message on an older evaluation that was set aside
        if (moved := self._work_folder.moved) is not None:
            for before, after in (
                (f"{name}.json", eval_dir(run_dir) / f"{moved.name}.json"),
                (films_dir(run_dir, name).name, films_dir(run_dir, moved.name)),
            ):
                if (eval_dir(run_dir) / before).exists():
                    (eval_dir(run_dir) / before).rename(after)
            self.set_aside = (
                f"{self.folder} begins anew ({self._work_folder.why}); the older evaluation is kept as "
                f"{moved.name}"
            )
        self._by_key: dict[Key, list[EpisodeRecord]] = {}
        self._bytes_read: dict[Path, int] = {}  # of the file of each part
        self._own: JsonLines[EpisodeRecord] | None = None
        try:
            if part is not None:
                self._own = JsonLines(
                    self.folder / part.file, TypeAdapter(EpisodeRecord), self._work_folder.busy
                )
            self.refresh()
        except BaseException:
            self.close()
            raise
        share = plan.episodes[part.number - 1 :: part.count] if part else []
        # Earlier starts left these episodes invalid after so many tries; they are played again.
        self._before = {
            key: len(tries)
            for key, tries in self._by_key.items()
            if tries[-1].row.outcome == "invalid"
        }
        self.left = [episode for episode in share if not self._is_over(episode)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder."""
        if self._own is not None:
            self._own.close()
        self._work_folder.close()

    def add(self, record: EpisodeRecord) -> None:
        """Write a finished episode of this process into the folder."""
        assert self._own is not None
        row = record.row
        tries = len(self._by_key.get((row.mode, row.task_id, row.seed, row.attempt), ())) + 1
        record = record.model_copy(update={"row": row.model_copy(update={"tries": tries})})
        self._own.add(record)
        self._bytes_read[self._own.path] = self._own.size
        self._note(record)

    def refresh(self) -> None:
        """Read the episodes that any process has written since the last call."""
        for path in sorted(self.folder.glob("episodes-*.jsonl")):
            begin = self._bytes_read.get(path, 0)
            with path.open("rb") as file:
                file.seek(begin)
                content = file.read()
            lines = content[: content.rfind(b"\n") + 1]  # the last line may be incomplete
            self._bytes_read[path] = begin + len(lines)
            for record in read_lines(path, TypeAdapter(EpisodeRecord), lines):
                self._note(record)

    def _note(self, record: EpisodeRecord) -> None:
        """Add a record in memory to the tries of its episode."""
        row = record.row
        key = row.mode, row.task_id, row.seed, row.attempt
        self._by_key.setdefault(key, []).append(record)

    def _is_over(self, episode: Planned) -> bool:
        """Return True if an episode is finished. Invalid tries of earlier starts do not count."""
        return len(self._by_key.get(episode.key, ())) > self._before.get(episode.key, 0)

    @property
    def over(self) -> list[EpisodeRecord]:
        """The newest try of each finished episode, in the order of the plan."""
        return [
            self._by_key[episode.key][-1]
            for episode in self.plan.episodes
            if self._is_over(episode)
        ]

    def counts(self, mode: Mode | None = None, *, heldout: bool | None = None) -> Counts:
        """Return the progress of the plan, or of one mode, or of its trained tasks or the others."""
        episodes = [
            episode
            for episode in self.plan.episodes
            if mode in (None, episode.mode) and heldout in (None, episode.heldout)
        ]
        outcomes = [
            self._by_key[episode.key][-1].row.outcome
            for episode in episodes
            if self._is_over(episode)
        ]
        return Counts(
            total=len(episodes),
            over=len(outcomes),
            passed=outcomes.count("pass"),
            invalid=outcomes.count("invalid"),
        )

    def counts_by_part(self, mode: Mode | None = None) -> dict[tuple[Mode, bool], Counts]:
        """Return (mode, True for tasks never trained on) -> progress, in the order of the plan."""
        parts = dict.fromkeys((episode.mode, episode.heldout) for episode in self.plan.episodes)
        return {
            (part_mode, heldout): self.counts(part_mode, heldout=heldout)
            for part_mode, heldout in parts
            if mode in (None, part_mode)
        }

    def rows(self, mode: Mode) -> list[EpisodeRow]:
        """Return the finished episodes of one mode, in the order of the plan.

        The plan says whether a task is trained on: env.tasks may have changed since an episode was played.
        """
        return [
            self._by_key[episode.key][-1].row.model_copy(update={"heldout": episode.heldout})
            for episode in self.plan.episodes
            if episode.mode == mode and self._is_over(episode)
        ]

    def films(self) -> list[Film]:
        """Return the films of finished episodes, in the order of the plan."""
        return [record.film for record in self.over if record.film is not None]

    def film_bytes(self) -> int:
        """Return the bytes of all screenshots in the folder."""
        return sum(record.film_bytes for tries in self._by_key.values() for record in tries)

    def wall_s(self) -> float:
        """Return the seconds in which at least one episode was played, over all starts."""
        all_tries = [record for tries in self._by_key.values() for record in tries]
        total, until = 0.0, 0.0
        for start, end in sorted(
            (record.ended_at - record.row.wall_s, record.ended_at) for record in all_tries
        ):
            total += max(0.0, end - max(until, start))
            until = max(until, end)
        return total


# --- the result ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChosenWeights:
    """The weights that are evaluated."""

    directory: Path | None  # None for the model without training
    version: int  # -1 for the model without training


def evaluation_of(
    config: Config,
    episodes: EpisodeFolder,
    weights: ChosenWeights,
    *,
    dart: str,
    left_out: Mapping[str, str],
) -> Evaluation:
    """Return the result of an evaluation. All episodes of the plan must be finished."""
    plan = episodes.plan
    trained = [task.id for task in plan.trained]
    heldout = [task.id for task in plan.heldout]
    rows = {mode: episodes.rows(mode) for mode in plan.modes}
    all_rows = [row for part in rows.values() for row in part]
    limits = [task.max_steps for task in plan.by_id.values()]
    evaluation = Evaluation(
        schema_version=SCHEMA,
        name=episodes.folder.name,
        model=config.model.path,
        weights=str(weights.directory or ""),
        policy_version=weights.version,
        seed=TRAIN_SEEDS,
        wall_s=episodes.wall_s(),
        modes={
            mode: mode_score(part, trained, heldout, config.eval.attempts)
            for mode, part in rows.items()
        },
        attempts=config.eval.attempts,
        settings=episodes.settings,
        protocol=check(config, all_rows, limits),
        dart=dart,
        finished_at=time.time(),
        interval_method=METHOD,
        left_out=dict(left_out),
        episodes=all_rows,
    )
    return evaluation.model_copy(update={"notes": list(_notes(evaluation))})


def _notes(evaluation: Evaluation) -> Iterator[str]:
    """Yield sentences on what a reader must know: tasks of one instance, mixed versions, repeated episodes."""
    rows, tasks = evaluation.episodes, {row.task_id for row in evaluation.episodes}
    if fixed := evaluation.fixed:
        names = f": {', '.join(fixed)}" if len(fixed) < len(tasks) else ""
        yield (
            f"{len(fixed)} of {len(tasks)} tasks begin alike for every seed, so that each has one instance, "
            f"which a run that trains on the task has played{names}"
        )
    versions = {version for row in rows if row.mode != "random" for version in row.versions}
    if versions - {evaluation.policy_version}:
        names = ", ".join(f"v{version}" for version in sorted(versions))
        yield f"weights of several versions have answered ({names}): these scores belong to none of them"
    replayed = sum(row.tries > 1 for row in rows)
    if replayed:
        yield f"{replayed} episodes were played again, because they were invalid at earlier starts"
