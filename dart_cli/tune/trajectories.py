"""Successes of runs and of Parquet files, step by step, as they were sampled: rejection sampling.

Trajectories        the chosen ones; batches of their steps
read_trajectories   chooses and checks them

Nothing is rendered or tokenised again: a step is the token ids that a policy read and sampled, and the
trainer's chains (data/loading.py) are made of them. Of runs only what names a step is in memory; the rest is
read from the database with each batch. Of Parquet files all is.
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
    """Where trajectories are."""

    def steps(self, planned: Sequence[PlannedSample]) -> Iterator[BatchStep]: ...

    def images(self, names: Iterable[str]) -> dict[str, bytes]: ...


@dataclass(frozen=True)
class _Place:
    """One step."""

    source: _Source
    planned: PlannedSample
    name: str  # of its trajectory, of one source alone


class Trajectories:
    """The chosen ones. Use as a context manager, or call `close`."""

    def __init__(self, places: list[_Place], digest: str, told: str, held: ExitStack) -> None:
        self._places = places
        self.digest = digest
        self.told = told  # what was chosen, and what was left out
        self._held = held

    def close(self) -> None:
        """Close the databases."""
        self._held.close()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def names(self) -> list[str]:
        """The trajectory of each step [N]."""
        return [place.name for place in self._places]

    def step(self, index: int) -> tuple[BatchStep, list[bytes]]:
        """One step, and the screenshots of its prompt."""
        place = self._places[index]
        [step] = place.source.steps([place.planned])
        images = place.source.images(set(step.image_hashes))
        return step, [images[name] for name in step.image_hashes]

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return these steps, chained as the trainer trains on them, each with advantage and weight 1."""
        found: list[BatchStep | None] = [None] * len(indices)
        images: dict[str, bytes] = {}
        by_source: dict[int, list[int]] = {}
        for at, index in enumerate(indices):
            by_source.setdefault(id(self._places[index].source), []).append(at)
        for rows in by_source.values():
            places = [self._places[indices[at]] for at in rows]
            source = places[0].source
            steps = source.steps([place.planned for place in places])
            for at, place, step in zip(rows, places, steps, strict=True):
                found[at] = replace(step, trajectory_id=place.name)
            wanted = {name for at in rows for name in _held(found[at]).image_hashes}
            images |= source.images(wanted)
        chains, samples = chained([_held(step) for step in found])
        return Batch.model_construct(
            batch_id=0,
            group_ids=[],
            temperature=1.0,
            chains=chains,
            samples=samples,
            images=images,
        )


def _held(step: BatchStep | None) -> BatchStep:
    assert step is not None  # every index was read
    return step


def is_run(path: Path) -> bool:
    """Whether it is a run directory."""
    return (path / DATABASE).is_file()


def is_parquet(path: Path) -> bool:
    """Whether it has files as `dart data export` writes them."""
    return path.suffix == ".parquet" if path.is_file() else any(path.glob("*.parquet"))


def read_trajectories(paths: Sequence[Path], config: Config) -> Trajectories:
    """Return the successes of runs and Parquet files, compared with the model. Raises UserError and ExchangeError."""
    facts = model_facts(config)
    assert facts is not None
    tune = config.tune
    chooser = _Chooser()
    with ExitStack() as held:
        for number, path in enumerate(paths):
            if is_run(path):
                reader = open_reader(path)
                held.callback(reader.close)
                _compare(path, _fingerprint_of(path), facts, config)
                source: _Source = _Run(reader)
                trajectories: Iterable[Trajectory | None] = _of_run(path, reader, tune)
            else:
                _compare(path, str(about_folder(path).get("vocabulary", "")), facts, config)
                source = files = _Files()
                trajectories = files.read(path, tune)
            before = chooser.count
            for each in trajectories:
                if each is None:
                    chooser.gone += 1
                    continue
                _check(path, each, facts)
                chooser.add(source, str(number), each)
            if chooser.count == before:
                raise UserError(_nothing(path, tune))
        return Trajectories(*chooser.result(), held.pop_all())


class _Chooser:
    """Which steps are learned, in order, and a digest of all they hold."""

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._digest = blake2b(digest_size=16)
        self._tasks: set[str] = set()
        self.count = 0  # trajectories
        self.gone = 0  # left out: a part of them is no longer kept

    def add(self, source: _Source, number: str, trajectory: Trajectory) -> None:
        self.count += 1
        self._tasks.add(trajectory.task_id)
        name = f"{number}/{trajectory.id}"
        self._digest.update(name.encode())
        for step in trajectory.steps:
            planned = PlannedSample("", trajectory.id, step.step, advantage=1.0, weight=1.0)
            self._places.append(_Place(source, planned, name))
            self._digest.update(int32s(step.prompt_token_ids).tobytes())
            self._digest.update(int32s(step.sampled.token_ids).tobytes())
            self._digest.update(json.dumps([step.image_hashes, step.sampled.patches]).encode())

    def result(self) -> tuple[list[_Place], str, str]:
        steps, tasks = len(self._places), len(self._tasks)
        told = f"{self.count} successes of {tasks} task{'' if tasks == 1 else 's'}, {steps} steps"
        if self.gone:
            told += f"; {self.gone} left out, whose screenshots are no longer kept"
        return self._places, self._digest.hexdigest(), told


class _Run:
    """A run's database."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def steps(self, planned: Sequence[PlannedSample]) -> Iterator[BatchStep]:
        return self._reader.planned_steps(planned)

    def images(self, names: Iterable[str]) -> dict[str, bytes]:
        return self._reader.screenshots(names)


def _of_run(path: Path, reader: Reader, tune: TuneConfig) -> Iterator[Trajectory | None]:
    """Yield the newest of each task; None for one of which a part is gone."""
    names: list[str] = []
    if tune.trajectories != "pool":
        names += select_ids(reader, Selection(outcome="pass"))
    if tune.trajectories != "own":
        names += select_ids(reader, Selection(pool=True))
    names = list(dict.fromkeys(names))
    groups = {row.id: row.task_id for row in reader.groups()}
    tasks = {row.id: groups[row.group_id] for row in reader.trajectories(outcome="pass")}
    tasks |= {row.trajectory_id: row.task_id for row in reader.pool()}
    kept = _newest(names, [tasks[name] for name in names], tune.per_task)
    with progress(f"read {path}", len(kept), "trajectories") as advance:
        for found in whole_trajectories(reader, kept):
            yield found
            advance(1)


class _Files:
    """Parquet files, in memory."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int], BatchStep] = {}
        self._images: dict[str, bytes] = {}

    def read(self, path: Path, tune: TuneConfig) -> list[Trajectory]:
        """Return the newest successes of each task: the last ones in the files."""
        passed = [each for each in read_folder(path) if each.outcome == "pass"]
        kept = _newest(passed, [each.task_id for each in passed], tune.per_task)
        for trajectory in kept:
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
        return kept

    def steps(self, planned: Sequence[PlannedSample]) -> Iterator[BatchStep]:
        return (self._steps[each.trajectory_id, each.step] for each in planned)

    def images(self, names: Iterable[str]) -> dict[str, bytes]:
        return {name: self._images[name] for name in names}


def _newest(values: Sequence[_Value], tasks: Sequence[str], most: int) -> list[_Value]:
    """Return the last `most` of each task, in their order; 0 for all."""
    if not most:
        return list(values)
    seen: dict[str, int] = {}
    kept: list[_Value] = []
    for value, task in zip(reversed(values), reversed(tasks), strict=True):
        seen[task] = seen.get(task, 0) + 1
        if seen[task] <= most:
            kept.append(value)
    return kept[::-1]


# --- what is refused ----------------------------------------------------------------------------


def _fingerprint_of(path: Path) -> str:
    """Of the vocabulary that a run's tokens are of; empty where its model is not on this host."""
    try:
        facts = model_facts(read_run(path))
    except DartError:
        return ""
    return "" if facts is None else facts.fingerprint


def _compare(path: Path, made_for: str, facts: ModelFacts, config: Config) -> None:
    if made_for and made_for != facts.fingerprint:
        raise UserError(
            f"{path}: its tokens were made for another model than model.path = {config.model.path}; begin "
            "with a model of the same tokenizer"
        )


def _check(path: Path, trajectory: Trajectory, facts: ModelFacts) -> None:
    for step in trajectory.steps:
        shown = [trajectory.images[name] for name in step.image_hashes]
        wrong = facts.incompatibility(list(step.prompt_token_ids), step.sampled, shown)
        if wrong is not None:
            column, text = wrong
            raise UserError(f"{path}: {trajectory.id} step {step.step}, {column}: {text}")


def _nothing(path: Path, tune: TuneConfig) -> str:
    if not is_run(path):
        return f"{path} has no successes; export some with `dart data export RUN {path}`"
    what = {"own": "successes", "pool": "members in its pool", "both": "successes, nor a pool"}
    other = {"own": '; or set tune.trajectories = "pool"', "pool": "", "both": ""}
    return (
        f"{path} has no {what[tune.trajectories]} whose screenshots are kept; `dart data stats {path}` tells "
        f"how its tasks went{other[tune.trajectories]}"
    )
