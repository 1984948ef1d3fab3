"""Export trajectories of a run, and import them into the pool of another: `dart data export` and `import`.

    Selection            which trajectories of a run are exported
    export_run           writes trajectories of a run to a folder of Parquet files
    whole_trajectories   reads trajectories of a run completely
    import_folder        imports a folder into the pool of a run that is not live
    check_folder         reads a folder and compares it with a configuration
    import_pool          imports the folders of data.pool when `dart data` starts
    add_folder           imports a folder into the pool of an open store
    join                 adds one success from outside to the pool; its id is computed from its content

A folder is read twice: first to check all of it, then to file it. So nothing of a folder with a mistake is
imported, and an interrupted import is completed by running it again.
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
"""A function that is called with the number of rows or trajectories that were processed."""


def _no_progress(_number: int) -> None:
    pass


# --- out ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """The choice of the trajectories of a run that are exported; only trajectories with an outcome are."""

    outcome: Outcome | None = None  # None for any
    tasks: tuple[str, ...] = ()  # empty for all
    pool: bool = False  # True for the members of the pool alone


@dataclass(frozen=True)
class ExportCounts:
    """Counts of what an export wrote."""

    trajectories: int
    steps: int
    skipped: int  # trajectories without some of their screenshots or steps


def select_ids(reader: Reader, selection: Selection) -> list[str]:
    """Return the ids of the selected trajectories, each once."""
    tasks = dict.fromkeys(selection.tasks) or [None]
    if selection.pool:
        members = (row for task in tasks for row in reader.pool(task_id=task))
        return [row.trajectory_id for row in members]
    return [
        row.id
        for task in tasks
        for row in reader.trajectories(task_id=task, outcome=selection.outcome)
        if row.outcome is not None
    ]


def export_run(
    reader: Reader,
    ids: Sequence[str],
    folder: Path,
    *,
    config: Config | None = None,
    progress: ProgressCallback = _no_progress,
    shard_bytes: int | None = None,
) -> ExportCounts:
    """Write trajectories into `folder`, which appears when it is complete; return how many were written.

    If the model of `config` is on this host, the files' metadata have its vocabulary. Raises ExchangeError
    if the folder cannot be written or no trajectory is complete, MissingPartError without pyarrow.
    """
    facts = None if config is None else model_facts(config)
    about = {"run": run_id(reader), "vocabulary": "" if facts is None else facts.fingerprint}
    size = {} if shard_bytes is None else {"shard_bytes": shard_bytes}
    steps = skipped = 0
    with write_folder(folder, about, **size) as shards:
        for trajectory in whole_trajectories(reader, ids):
            if trajectory is None:
                skipped += 1
            else:
                shards.add(trajectory)
                steps += len(trajectory.steps)
            progress(1)
        if not shards.trajectories:
            raise ExchangeError(
                f"nothing to export from {reader.path.parent}: no trajectory fits and is whole; "
                "`dart data ls` lists its trajectories"
            )
    return ExportCounts(trajectories=shards.trajectories, steps=steps, skipped=skipped)


def run_id(reader: Reader) -> str:
    """Return the run's id; empty if the run has only a pool and was never started."""
    try:
        return reader.run().id
    except StoreError:
        return ""


def whole_trajectories(reader: Reader, ids: Sequence[str]) -> Iterator[Trajectory | None]:
    """Yield each trajectory with its steps and images, or None if a part of it is missing."""
    run = run_id(reader)
    for trajectory_id in ids:
        # 1. Read its steps and images, and check that all are there.
        steps = reader.steps(trajectory_id)
        row, member = reader.trajectory(trajectory_id), reader.pool_member(trajectory_id)
        hashes = {image_hash for step in steps for image_hash in step.image_hashes}
        images = reader.screenshots(hashes)
        expected = member.steps if row is None and member is not None else row and row.steps
        if not steps or len(steps) != expected or len(images) != len(hashes):
            yield None
            continue
        # 2. Add its task, from its group or from the pool.
        instance = member if row is None else reader.groups_by_id([row.group_id])[row.group_id]
        assert instance is not None
        suite, task_id = instance.suite, instance.task_id
        trajectory = Trajectory(
            id=trajectory_id,
            suite=suite,
            task_id=task_id,
            task_seed=instance.task_seed,
            instruction=reader.instruction(suite, task_id, [trajectory_id]),
            source="online" if member is None else member.source,
            origin=f"{run}/{trajectory_id}" if member is None or row is not None else member.origin,
            outcome="pass",
            reward=1.0 if member is None else member.reward,
            steps=steps,
            images=images,
        )
        yield trajectory if row is None else _with_verdict(reader, trajectory, row)


def _with_verdict(reader: Reader, trajectory: Trajectory, row: TrajectoryRow) -> Trajectory:
    """Return a trajectory of this run with its verdict and its last screen."""
    assert row.outcome is not None
    final = row.final_screenshot
    return replace(
        trajectory,
        outcome=row.outcome,
        reward=row.reward,
        verdict_reason=row.verdict_reason or "",
        stop_reason=row.stop_reason or "",
        app_log=row.app_log,
        final_screenshot=reader.screenshots([final]).get(final) if final else None,
    )


# --- in -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImportCounts:
    """Counts of what an import did with the trajectories of a folder."""

    joined: int
    already_there: int  # in the pool or the run
    not_passed: int

    def __str__(self) -> str:
        return (
            f"{self.joined} joined the pool, {self.already_there} were in it already, "
            f"{self.not_passed} are no successes"
        )


def import_folder(
    config: Config, folder: Path, progress: ProgressCallback = _no_progress
) -> ImportCounts:
    """Add a folder's successes to the pool of `config`'s run.

    `progress` is called twice for every row: when it is checked and when it is filed. Raises ExchangeError
    for the first mistake in the files, RunDirectoryError while the run is live.
    """
    about_folder(folder)
    is_new = not (config.run.dir / DATABASE).exists()
    # A new run is made only if the folder has no mistake.
    checked_images = check_folder(config, folder, progress) if is_new else None
    try:
        store = open_store(config.run.dir)
    except RunDirectoryError as error:
        raise RunDirectoryError(
            f'{error}; or have it imported at its next start: data.pool = ["{folder}"]'
        ) from None
    with store:
        return add_folder(store, config, folder, progress, checked_images)


def import_pool(config: Config, store: Store) -> None:
    """Add the successes of all folders of data.pool to the pool.

    A folder that has not changed since it was imported is not read again. Raises ExchangeError for the
    first mistake in the files.
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
    """Return a hash of a folder's file names, sizes and times, and of the settings for its check.

    Both times of a file are included, since a copy may keep the time of modification, but not the time of
    change.
    """
    facts = model_facts(config)
    files = [(path.name, path.stat()) for path in parquet_files(folder)]
    content = [
        config.env.suite,
        sorted(task.id for task in heldout_tasks(config)),
        None if facts is None else asdict(facts) | {"forbidden": sorted(facts.forbidden)},
        *((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in files),
    ]
    return blake2b(repr(content).encode(), digest_size=16).hexdigest()


def check_folder(
    config: Config, folder: Path, progress: ProgressCallback = _no_progress
) -> set[str]:
    """Read and check all of a folder; return the hashes of its images. Raises ExchangeError for a mistake."""
    checked_images: set[str] = set()
    for _ in read_folder(folder, _make_check(config, folder), progress, checked_images):
        pass
    return checked_images


def add_folder(
    store: Store,
    config: Config,
    folder: Path,
    progress: ProgressCallback = _no_progress,
    checked_images: set[str] | None = None,
) -> ImportCounts:
    """Add a folder's successes to the pool in `store`, unless the folder has a mistake.

    `checked_images` is the result of `check_folder`, if that was called before.
    """
    if checked_images is None:
        checked_images = check_folder(config, folder, progress)
    check = _make_check(config, folder)
    counts = {"joined": 0, "already_there": 0, "not_passed": 0}
    now = time.time()
    trajectories = read_folder(folder, check, progress, checked_images)
    for number, trajectory in enumerate(trajectories, start=1):
        if trajectory.outcome != "pass":
            counts["not_passed"] += 1
        elif join(store, replace(trajectory, suite=config.env.suite), at=now):
            counts["joined"] += 1
        else:
            counts["already_there"] += 1
        if number % COMMIT_EVERY == 0:
            store.commit()
    store.commit()
    return ImportCounts(**counts)


def join(store: Store, trajectory: Trajectory, *, at: float) -> bool:
    """Add one success to the pool; return False if it is in the pool or comes from this run."""
    run, _, trajectory_id = trajectory.origin.rpartition("/")
    if run and run == run_id(store) and store.trajectory(trajectory_id) is not None:
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
        has_logprobs=trajectory.has_logprobs,
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


def _make_check(config: Config, folder: Path) -> StepCheck:
    """Return the check that a trajectory fits `config`'s run: its suite, task, seed, tokens and images."""
    facts, suite = model_facts(config), config.env.suite
    heldout = {task.id for task in heldout_tasks(config)}
    # env.suite may be a path such as `my_package.my_module:MySuite`, and files may have it or the name.
    names = {suite, load_suite(suite).name}
    made_for = about_folder(folder).get("vocabulary", "")
    if facts is not None and made_for and made_for != facts.fingerprint:
        raise ExchangeError(
            f"{folder}: its tokens were made for another model than model.path = "
            f"{config.model.path}; collect them again with this configuration"
        )

    def check(trajectory: Trajectory) -> tuple[int, str, str] | None:
        """Return (step, column, what is wrong) if the trajectory does not fit the run; else None."""
        if trajectory.suite not in names:
            return 0, "suite", f"{trajectory.suite!r}, but the run plays env.suite = {suite!r}"
        try:
            task = find_task(suite, trajectory.task_id)
        except TaskError as error:
            return 0, "task_id", str(error)
        if task.id in heldout:
            return 0, "task_id", f"{task.id} is held out: training on it would spoil the evaluation"
        if trajectory.task_seed >= TRAIN_SEEDS:
            text = (
                f"{trajectory.task_seed} is held out (training seeds are below {TRAIN_SEEDS}): "
                "training on it would spoil the evaluation; leave these rows out"
            )
            return 0, "task_seed", text
        if facts is None:
            return None
        for step in trajectory.steps:
            images = [trajectory.images[image_hash] for image_hash in step.image_hashes]
            mistake = facts.incompatibility(step.prompt_token_ids, step.sampled, images)
            if mistake is not None:
                return step.step, *mistake
        return None

    return check
