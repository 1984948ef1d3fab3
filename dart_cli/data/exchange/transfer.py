"""Trajectories leave a run and join the pool of another: `dart data export` and `import`.

    Choice          which trajectories of a run are exported
    export_run      a run -> a folder of Parquet files
    whole_trajectories   trajectories of a run with all that they hold
    import_folder   a folder -> the pool of a run that is not live
    check_folder    a folder, read whole and compared with a configuration
    import_pool     the folders of data.pool -> the pool, when `dart data` starts
    join            one success from outside -> the pool, under an id that follows from its content

A folder is read twice: first all of it is checked, then it is filed. So nothing of a folder with a
mistake joins, and an interrupted import is completed by running it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path

from bus.errors import ExchangeError, RunDirectoryError, StoreError, TaskError
from bus.messages import Outcome
from dart_cli.config.schema import TRAIN_SEEDS, Config
from dart_cli.config.task_split import heldout_tasks
from dart_cli.data.checks import model_facts
from dart_cli.data.exchange.parquet_read import StepCheck, about_folder, parquet_files, read_folder
from dart_cli.data.exchange.parquet_schema import Trajectory, content_id
from dart_cli.data.exchange.parquet_write import write_folder
from dart_cli.data.store.open import DATABASE, open_store
from dart_cli.data.store.reader import Reader
from dart_cli.data.store.rows import PoolRow, PoolSource, TrajectoryRow
from dart_cli.data.store.writer import Store
from envs.contract.registry import find_task, load_suite

log = logging.getLogger(__name__)

COMMIT_EVERY = 200  # trajectories

ProgressCallback = Callable[[int], None]
"""Called with the number of rows or trajectories that were processed."""


def _quietly(_number: int) -> None:
    pass


# --- out ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Which trajectories of a run are exported: those that were judged and fit."""

    outcome: Outcome | None = None
    tasks: tuple[str, ...] = ()
    pool: bool = False  # members of the pool alone


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    trajectories: int
    steps: int
    skipped: int  # their screenshots were removed, or steps are missing


def chosen(reader: Reader, choice: Choice) -> list[str]:
    """Ids of the trajectories that an export writes, each once."""
    tasks = dict.fromkeys(choice.tasks) or [None]
    if choice.pool:
        members = (row for task in tasks for row in reader.pool(task_id=task))
        return [row.trajectory_id for row in members]
    return [
        row.id
        for task in tasks
        for row in reader.trajectories(task_id=task, outcome=choice.outcome)
        if row.outcome is not None
    ]


def export_run(
    reader: Reader,
    ids: Sequence[str],
    folder: Path,
    *,
    config: Config | None = None,
    progress: ProgressCallback = _quietly,
    shard_bytes: int | None = None,
) -> Exported:
    """Write the trajectories into `folder`, which appears whole at the end.

    With a `config` whose model is on this host, the files note the vocabulary they were made for.
    Raises ExchangeError, MissingPartError.
    """
    facts = None if config is None else model_facts(config)
    about = {"run": run_id(reader), "vocabulary": "" if facts is None else facts.fingerprint}
    size = {} if shard_bytes is None else {"shard_bytes": shard_bytes}
    steps = skipped = 0
    with write_folder(folder, about, **size) as shards:
        for found in whole_trajectories(reader, ids):
            if found is None:
                skipped += 1
            else:
                shards.add(found)
                steps += len(found.steps)
            progress(1)
        written = shards.written
        if not written:
            raise ExchangeError(
                f"nothing to export from {reader.path.parent}: no trajectory fits and is whole; "
                "`dart data ls` lists its trajectories"
            )
    return Exported(written, steps, skipped)


def run_id(reader: Reader) -> str:
    """Return the run's id; empty for one that holds a pool and was never started."""
    try:
        return reader.run().id
    except StoreError:
        return ""


def whole_trajectories(reader: Reader, ids: Sequence[str]) -> Iterator[Trajectory | None]:
    """Each trajectory, or None where a part of it is gone."""
    run = run_id(reader)
    for name in ids:
        steps = reader.steps(name)
        row, member = reader.trajectory(name), reader.pool_member(name)
        wanted = {image for step in steps for image in step.image_hashes}
        images = reader.screenshots(wanted)
        expected = member.steps if row is None and member is not None else row and row.steps
        if not steps or len(steps) != expected or len(images) != len(wanted):
            yield None
            continue
        of = member if row is None else reader.groups_by_id([row.group_id])[row.group_id]
        assert of is not None
        found = Trajectory(
            id=name,
            suite=of.suite,
            task_id=of.task_id,
            task_seed=of.task_seed,
            instruction=reader.instruction(of.suite, of.task_id, [name]),
            source="online" if member is None else member.source,
            origin=f"{run}/{name}" if member is None or row is not None else member.origin,
            outcome="pass",
            reward=1.0 if member is None else member.reward,
            steps=steps,
            images=images,
        )
        yield found if row is None else _as_played(reader, found, row)


def _as_played(reader: Reader, found: Trajectory, row: TrajectoryRow) -> Trajectory:
    """With the verdict and the last screen of a trajectory of this run."""
    assert row.outcome is not None
    final = row.final_screenshot
    return replace(
        found,
        outcome=row.outcome,
        reward=row.reward,
        verdict_reason=row.verdict_reason or "",
        stop_reason=row.stop_reason or "",
        final_screenshot=reader.screenshots([final]).get(final) if final else None,
    )


# --- in -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Imported:
    """What an import did."""

    joined: int
    there: int  # in the pool or the run already
    not_passed: int  # no successes

    def __str__(self) -> str:
        return (
            f"{self.joined} joined the pool, {self.there} were in it already, "
            f"{self.not_passed} are no successes"
        )


def import_folder(config: Config, folder: Path, progress: ProgressCallback = _quietly) -> Imported:
    """Put a folder's successes into the pool of `config`'s run.

    `progress` counts every row twice: when it is checked and when it is filed. Raises ExchangeError
    for the first mistake in the files, RunDirectoryError while the run is live.
    """
    about_folder(folder)
    is_new = not (config.run.dir / DATABASE).exists()
    whole = check_folder(config, folder, progress) if is_new else None  # before anything is made
    try:
        store = open_store(config.run.dir)
    except RunDirectoryError as error:
        raise RunDirectoryError(
            f'{error}; or have it imported at its next start: data.pool = ["{folder}"]'
        ) from None
    with store:
        return add_folder(store, config, folder, progress, whole)


def import_pool(config: Config, store: Store) -> None:
    """Put the successes of all folders of data.pool into the pool. Raises as import_folder does.

    A folder that has not changed since is not read again: `dart data` starts as fast as without.
    """
    for folder in config.data.pool:
        place, fingerprint = str(folder.resolve()), _fingerprint(config, folder)
        if store.pool_folder(place) == fingerprint:
            log.info("data.pool %s: imported before", folder)
            continue
        log.info("data.pool %s: %s", folder, add_folder(store, config, folder))
        store.save_pool_folder(place, fingerprint)
        store.commit()


def _fingerprint(config: Config, folder: Path) -> str:
    """Return a digest of a folder's files by name, size and times, and of all that they are checked against.

    A copy that keeps the time of modification has another time of change.
    """
    facts = model_facts(config)
    files = [(path.name, path.stat()) for path in parquet_files(folder)]
    compared = [
        config.env.suite,
        sorted(task.id for task in heldout_tasks(config)),
        None if facts is None else asdict(facts) | {"forbidden": sorted(facts.forbidden)},
        *((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in files),
    ]
    return blake2b(repr(compared).encode(), digest_size=16).hexdigest()


def check_folder(config: Config, folder: Path, progress: ProgressCallback = _quietly) -> set[str]:
    """Read all of a folder; returns the hashes of its images, which are whole. Raises ExchangeError."""
    whole: set[str] = set()
    for _ in read_folder(folder, _check(config, folder), progress, whole):
        pass
    return whole


def add_folder(
    store: Store,
    config: Config,
    folder: Path,
    progress: ProgressCallback = _quietly,
    whole: set[str] | None = None,
) -> Imported:
    """Put a folder's successes into the pool that `store` writes; all of it or nothing.

    `whole` is the result of `check_folder`, if that was called before.
    """
    if whole is None:
        whole = check_folder(config, folder, progress)
    check = _check(config, folder)
    counts = {"joined": 0, "there": 0, "not_passed": 0}
    now = time.time()
    for number, trajectory in enumerate(read_folder(folder, check, progress, whole), start=1):
        if trajectory.outcome != "pass":
            counts["not_passed"] += 1
        elif join(store, replace(trajectory, suite=config.env.suite), at=now):
            counts["joined"] += 1
        else:
            counts["there"] += 1
        if number % COMMIT_EVERY == 0:
            store.commit()
    store.commit()
    return Imported(**counts)


def join(store: Store, trajectory: Trajectory, *, at: float) -> bool:
    """File one success in the pool; False if it, or its original, is in the pool or run already."""
    home, _, name = trajectory.origin.rpartition("/")
    if home and home == run_id(store) and store.trajectory(name) is not None:
        return False
    key = content_id(trajectory)
    source: PoolSource = "imported" if trajectory.source == "online" else trajectory.source
    row = PoolRow(
        trajectory_id=key,
        suite=trajectory.suite,
        task_id=trajectory.task_id,
        task_seed=trajectory.task_seed,
        source=source,
        steps=len(trajectory.steps),
        known=trajectory.known,
        origin=trajectory.origin,
        added_at=at,
        evicted_at=None,
        used=0,
        reward=1.0 if trajectory.reward is None else trajectory.reward,
    )
    steps = [
        replace(
            step,
            trajectory_id=key,
            at=at,
            instruction=trajectory.instruction if step.step == 0 else "",
        )
        for step in trajectory.steps
    ]
    return store.add_pool_member(row, steps, trajectory.images)


def _check(config: Config, folder: Path) -> StepCheck:
    """Return what a trajectory must satisfy beyond its own consistency to join `config`'s run."""
    facts, suite = model_facts(config), config.env.suite
    held = {task.id for task in heldout_tasks(config)}
    names = {suite, load_suite(suite).name}  # a suite of one's own is called by its place, too
    made_for = about_folder(folder).get("vocabulary", "")
    if facts is not None and made_for and made_for != facts.fingerprint:
        raise ExchangeError(
            f"{folder}: its tokens were made for another model than model.path = "
            f"{config.model.path}; collect them again with this configuration"
        )

    def check(trajectory: Trajectory) -> tuple[int, str, str] | None:
        if trajectory.suite not in names:
            return 0, "suite", f"{trajectory.suite!r}, but the run plays env.suite = {suite!r}"
        try:
            task = find_task(suite, trajectory.task_id)
        except TaskError as error:
            return 0, "task_id", str(error)
        if task.id in held:
            return 0, "task_id", f"{task.id} is held out: training on it would spoil the evaluation"
        if trajectory.task_seed >= TRAIN_SEEDS:
            return (
                0,
                "task_seed",
                (
                    f"{trajectory.task_seed} is held out (training seeds are below {TRAIN_SEEDS}): "
                    "training on it would spoil the evaluation; leave these rows out"
                ),
            )
        if facts is None:
            return None
        for step in trajectory.steps:
            shown = [trajectory.images[name] for name in step.image_hashes]
            wrong = facts.incompatibility(step.prompt_token_ids, step.sampled, shown)
            if wrong is not None:
                return step.step, *wrong
        return None

    return check
