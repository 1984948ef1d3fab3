"""Successes of runs and of Parquet files, step by step, as they were sampled (rejection sampling).

Trajectories        the selected trajectories; makes batches of their steps
read_trajectories   selects and checks them

Nothing is rendered or tokenised again: a step is the token ids that a policy read and sampled, and the
trainer's chains (data/loading.py) are made of them. Of a run, only the names of steps are in memory; the rest
is read from the database with each batch. Parquet files are in memory as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, TypeVar

from bus.errors import DartError, UserError
from bus.messages import Batch
from bus.packed import float64s, int32s
from dart_cli.config.schema import Config, TuneConfig
from dart_cli.data.checks import ModelFacts, model_facts
from dart_cli.data.exchange.parquet_read import about_folder, read_folder
from dart_cli.data.exchange.parquet_schema import Trajectory
from dart_cli.data.exchange.transfer import Selection, select_ids, whole_trajectories
from dart_cli.data.loading import chained
from dart_cli.data.store.open import DATABASE, open_reader
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import PlannedSample
from dart_cli.data.store.steps import BatchStep
from dart_cli.runtime.run_dir import read_run
from dart_cli.runtime.tables import progress

_Value = TypeVar("_Value")


class _Source(Protocol):
    """A source of trajectories: a run or Parquet files."""

    def steps(self, planned: Sequence[PlannedSample]) -> Iterator[BatchStep]: ...

    def images(self, names: Iterable[str]) -> dict[str, bytes]: ...


@dataclass(frozen=True)
class _Place:
    """One step, and where it is."""

    source: _Source
    planned: PlannedSample
    name: str  # of its trajectory, different in each source


class Trajectories:
    """The selected trajectories. Call `close` at the end."""

    def __init__(
        self, places: list[_Place], digest: str, description: str, databases: ExitStack
    ) -> None:
        self._places = places
        self.digest = digest  # of all their steps
        self.description = description  # what was selected, and what was left out
        self._databases = databases

    def close(self) -> None:
        """Close the databases."""
        self._databases.close()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def names(self) -> list[str]:
        """The trajectory of each step [N]."""
        return [place.name for place in self._places]

    def step(self, index: int) -> tuple[BatchStep, list[bytes]]:
        """Return one step, and the screenshots of its prompt."""
        place = self._places[index]
        [step] = place.source.steps([place.planned])
        images = place.source.images(set(step.image_hashes))
        return step, [images[name] for name in step.image_hashes]

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return these steps, chained as the trainer trains on them, each with advantage and weight 1."""
        steps: dict[int, BatchStep] = {}  # by position in the batch
        images: dict[str, bytes] = {}
        by_source: dict[int, list[int]] = {}
        for position, index in enumerate(indices):
            by_source.setdefault(id(self._places[index].source), []).append(position)
        for positions in by_source.values():
            places = [self._places[indices[position]] for position in positions]
            source = places[0].source
            rows = source.steps([place.planned for place in places])
            for position, place, step in zip(positions, places, rows, strict=True):
                steps[position] = replace(step, trajectory_id=place.name)
            names = {name for position in positions for name in steps[position].image_hashes}
            images |= source.images(names)
        chains, samples = chained([steps[position] for position in range(len(indices))])
        return Batch.model_construct(
            batch_id=0,
            group_ids=[],
            temperature=1.0,
            chains=chains,
            samples=samples,
            images=images,
        )


def is_run(path: Path) -> bool:
    """Return True for a run directory."""
    return (path / DATABASE).is_file()


def is_parquet(path: Path) -> bool:
    """Return True for a Parquet file, or a folder of them, as `dart data export` writes it."""
    return path.suffix == ".parquet" if path.is_file() else any(path.glob("*.parquet"))


def read_trajectories(paths: Sequence[Path], config: Config) -> Trajectories:
    """Return the successes of runs and Parquet files.

    Raises UserError if they do not fit the model, or if a path has none, and ExchangeError for malformed
    files.
    """
    facts = model_facts(config)
    assert facts is not None
    tune = config.tune
    selection = _Selection()
    with ExitStack() as databases:
        for number, path in enumerate(paths):
            if is_run(path):
                reader = open_reader(path)
                databases.callback(reader.close)
                _refuse_other_vocabulary(path, _fingerprint_of(path), facts, config)
                source: _Source = _Run(reader)
                trajectories: Iterable[Trajectory | None] = _of_run(path, reader, tune)
            else:
                vocabulary = str(about_folder(path).get("vocabulary", ""))
                _refuse_other_vocabulary(path, vocabulary, facts, config)
                source = files = _Files()
                trajectories = files.read(path, tune)
            before = selection.count
            for trajectory in trajectories:
                if trajectory is None:
                    selection.incomplete += 1
                    continue
                _check(path, trajectory, facts)
                selection.add(source, str(number), trajectory)
            if selection.count == before:
                raise UserError(_no_successes(path, tune))
        return Trajectories(
            selection.places, selection.digest, selection.description, databases.pop_all()
        )


class _Selection:
    """The selected steps, in order, and a digest of their content."""

    def __init__(self) -> None:
        self.places: list[_Place] = []
        self._digest = blake2b(digest_size=16)
        self._tasks: set[str] = set()
        self.count = 0  # trajectories
        self.incomplete = 0  # left out, since a part of them was removed

    def add(self, source: _Source, number: str, trajectory: Trajectory) -> None:
        """Select all steps of a trajectory; `number` is the place of its source in `tune.data`."""
        self.count += 1
        self._tasks.add(trajectory.task_id)
        name = f"{number}/{trajectory.id}"
        self._digest.update(name.encode())
        for step in trajectory.steps:
            planned = PlannedSample("", trajectory.id, step.step, advantage=1.0, weight=1.0)
            self.places.append(_Place(source, planned, name))
            self._digest.update(int32s(step.prompt_token_ids).tobytes())
            self._digest.update(int32s(step.sampled.token_ids).tobytes())
            self._digest.update(json.dumps([step.image_hashes, step.sampled.patches]).encode())

    @property
    def digest(self) -> str:
        """Digest of all selected steps."""
        return self._digest.hexdigest()

    @property
    def description(self) -> str:
        """What was selected, and what was left out."""
        steps, tasks = len(self.places), len(self._tasks)
        text = f"{self.count} successes of {tasks} task{'' if tasks == 1 else 's'}, {steps} steps"
        if self.incomplete:
            text += f"; {self.incomplete} left out, whose screenshots were removed"
        return text


class _Run:
    """The database of a run, as a source."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def steps(self, planned: Sequence[PlannedSample]) -> Iterator[BatchStep]:
        return self._reader.planned_steps(planned)

    def images(self, names: Iterable[str]) -> dict[str, bytes]:
        return self._reader.screenshots(names)


def _of_run(path: Path, reader: Reader, tune: TuneConfig) -> Iterator[Trajectory | None]:
    """Yield the newest successes of each task; None for one of which a part was removed."""
    names: list[str] = []
    if tune.trajectories != "pool":
        names += select_ids(reader, Selection(outcome="pass"))
    if tune.trajectories != "own":
        names += select_ids(reader, Selection(pool=True))
    names = list(dict.fromkeys(names))
    groups = {row.id: row.task_id for row in reader.groups()}
    tasks = {row.id: groups[row.group_id] for row in reader.trajectories(outcome="pass")}
    tasks |= {row.trajectory_id: row.task_id for row in reader.pool()}
    newest = _newest(names, [tasks[name] for name in names], tune.per_task)
    with progress(f"read {path}", len(newest), "trajectories") as advance:
        for trajectory in whole_trajectories(reader, newest):
            yield trajectory
            advance(1)


class _Files:
    """Parquet files in memory, as a source."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int], BatchStep] = {}
        self._images: dict[str, bytes] = {}

    def read(self, path: Path, tune: TuneConfig) -> list[Trajectory]:
        """Return the newest successes of each task: the last ones in the files."""
        passes = [row for row in read_folder(path) if row.outcome == "pass"]
        newest = _newest(passes, [row.task_id for row in passes], tune.per_task)
        for trajectory in newest:
            self._images |= trajectory.images
            for step in trajectory.steps:
                self._steps[trajectory.id, step.step] = BatchStep(
                    group_id="",
                    trajectory_id=trajectory.id,
                    step=step.step,
                    prompt_token_ids=int32s(step.prompt_token_ids),
                    token_ids=int32s(step.sampled.token_ids),
                    image_hashes=step.image_hashes,
                    behaviour_logprobs=float64s([]),
                    version_spans=[],
                    advantage=1.0,
                    weight=1.0,
                    patches=step.sampled.patches,
                )
        return newest

    def steps(self, planned: Sequence[PlannedSample]) -> Iterator[BatchStep]:
        return (self._steps[sample.trajectory_id, sample.step] for sample in planned)

    def images(self, names: Iterable[str]) -> dict[str, bytes]:
        return {name: self._images[name] for name in names}


def _newest(values: Sequence[_Value], tasks: Sequence[str], most: int) -> list[_Value]:
    """Return the last `most` values of each task, in their order; all of them for 0."""
    if not most:
        return list(values)
    counts: dict[str, int] = {}
    newest: list[_Value] = []
    for value, task in zip(reversed(values), reversed(tasks), strict=True):
        counts[task] = counts.get(task, 0) + 1
        if counts[task] <= most:
            newest.append(value)
    return newest[::-1]


# --- what is refused ----------------------------------------------------------------------------


def _fingerprint_of(path: Path) -> str:
    """Return the fingerprint of the vocabulary of a run; empty if its model is not on this host."""
    try:
        facts = model_facts(read_run(path))
    except DartError:
        return ""
    return "" if facts is None else facts.fingerprint


def _refuse_other_vocabulary(
    path: Path, fingerprint: str, facts: ModelFacts, config: Config
) -> None:
    """Raise UserError if `fingerprint` is of another vocabulary than the model's; empty means unknown."""
    if fingerprint and fingerprint != facts.fingerprint:
        raise UserError(
            f"{path}: its tokens are not those of model.path = {config.model.path}; begin with a model that "
            "has the same tokenizer"
        )


def _check(path: Path, trajectory: Trajectory, facts: ModelFacts) -> None:
    """Raise UserError if the model cannot be trained on a step."""
    for step in trajectory.steps:
        images = [trajectory.images[name] for name in step.image_hashes]
        problem = facts.incompatibility(list(step.prompt_token_ids), step.sampled, images)
        if problem is not None:
            column, text = problem
            raise UserError(f"{path}: {trajectory.id} step {step.step}, {column}: {text}")


def _no_successes(path: Path, tune: TuneConfig) -> str:
    """Return the error for a path without successes."""
    if not is_run(path):
        return f"{path} has no successes; export some with `dart data export RUN {path}`"
    what = {"own": "successes", "pool": "members in its pool", "both": "successes, nor a pool"}
    other = {"own": '; or set tune.trajectories = "pool"', "pool": "", "both": ""}
    return (
        f"{path} has no {what[tune.trajectories]} whose screenshots are still stored; `dart data stats {path}` "
        f"shows how its tasks went{other[tune.trajectories]}"
    )
