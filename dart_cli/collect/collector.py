"""The `dart data collect` command: plays training tasks in this process and keeps the successes.

    run_collect      plays training tasks, keeps the successes, prints a table
    collected_tasks  the tasks that are played
    play_quotas      plays until each task has enough successes

Episodes are played as in `dart env` (play_episode), so that a kept step has the same prompt, history and
tokens as a step of a run. Seeds follow from run.seed and the task: a success that exists already is neither
played nor kept again.

No policy sampled the tokens of the oracle, so their log-probabilities are unknown. The tokens of a policy
have the log-probabilities of the distribution from which they were sampled, with the hint in the prompt;
the prompt is stored without the hint. So pi(a | s) / mu(a | s, hint) is the importance weight of such a
step. The actions of a teacher are written in the policy's tokens (teacher.py), whose log-probabilities are
unknown, too.

A collection with a teacher is continued by the next start. With --out it goes on in FOLDER.partial, a run
directory that has only a pool, and the folder is written from there at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

from rich.console import Console

from bus.endpoints import make_private_dir
from bus.errors import RunDirectoryError, TaskError, UserError
from bus.messages import StepRecord
from dart_cli.collect import CollectOptions
from dart_cli.collect.policies import ActionWriter, HintedPolicy, OraclePolicy
from dart_cli.collect.quotas import Quota
from dart_cli.collect.teacher import open_teacher, probe_teacher
from dart_cli.collect.teacher_record import FILE, TeacherRecord, teacher_id
from dart_cli.config.model_folder import model_folder
from dart_cli.config.schema import Config
from dart_cli.config.task_split import heldout_tasks, training_tasks
from dart_cli.data.checks import model_facts
from dart_cli.data.exchange.parquet_schema import Trajectory, content_id
from dart_cli.data.exchange.parquet_write import refuse_existing, write_folder
from dart_cli.data.exchange.transfer import Selection, export_run, join, select_ids
from dart_cli.data.store.open import open_reader, open_store
from dart_cli.data.store.rows import PoolRow, PoolSource
from dart_cli.data.store.steps import StepRow
from dart_cli.env.step_prompts import action_spec_of
from dart_cli.player.chosen_model import chosen_weights, loaded_model
from dart_cli.player.episodes import (
    PlannedEpisode,
    PlayedEpisode,
    PolicyOf,
    answered_by,
    play,
)
from dart_cli.rollout.worker import load_prompt_encoder
from dart_cli.runtime.background import run_until_stopped
from dart_cli.runtime.logs import logging_to
from dart_cli.runtime.role import end_with_parent, limit_threads, take_gpus
from dart_cli.runtime.tables import page_table, progress
from dart_cli.runtime.waits import OpenWaits
from dart_cli.weights.folder import folder_digest
from envs.contract.base import Task
from envs.contract.blobs import content_hash
from envs.contract.registry import select_tasks, tasks_of

logger = logging.getLogger(__name__)


def run_collect(config: Config, options: CollectOptions) -> list[Quota]:
    """Collect successes into the pool of the run, or into the folder --out, and print a table.

    A signal ends the collection: the successes so far are kept and printed, and SystemExit is raised. Raises
    TaskError, ConfigError if there is no GPU for the model, RunDirectoryError while the run is live,
    ExchangeError, UserError if there is no success at all, if the teacher's server is not there, or if the
    teacher's budget was spent by earlier starts.
    """
    tasks, out = collected_tasks(config, options), options.out
    limit_threads(config.rollout.threads)
    end_with_parent()
    by_teacher = options.player == "teacher"
    if options.player == "policy" or (by_teacher and not config.teacher.url):
        take_gpus(config, "rollout", "collect-0")
    if by_teacher:
        if config.teacher.url:
            probe_teacher(config.teacher)
        if out is not None:
            refuse_existing(out)
            config = config.model_copy(
                update={"run": config.run.model_copy(update={"dir": _partial(out)})}
            )
    with contextlib.ExitStack() as stack:
        if out is None or by_teacher:
            make_private_dir(config.run.dir)
            stack.enter_context(logging_to(config.run.dir, "collect"))
            existing, keep = stack.enter_context(_into_pool(config))
        else:
            existing, keep = stack.enter_context(_into_folder(config, out))
        record = stack.enter_context(_record(config, options)) if by_teacher else None
        quotas = [Quota(task, options, config.run.seed, config.env.seeds) for task in tasks]
        for quota in quotas:
            quota.skip(existing, set() if record is None else record.settled_seeds(quota.task.id))
        exit_code = 0
        if any(quota.missing for quota in quotas):
            if record is not None and record.is_spent:
                raise UserError(record.budget)
            try:
                exit_code = _collect(config, options, quotas, keep, record)
            except UserError:
                if record is not None:  # its successes are kept
                    _print_table(config, quotas, options, record, is_stopped=True)
                raise
        if not any(quota.successes for quota in quotas):
            if exit_code:
                raise SystemExit(exit_code)  # within the block, so that no folder is made
            if record is not None:
                _print_table(config, quotas, options, record, is_stopped=True)
            raise UserError(f"no success was collected: {_why_none(quotas, record)}")
    if exit_code:
        raise SystemExit(exit_code)
    if record is not None and out is not None and not _is_cut_short(quotas, record):
        _write_folder(config, out)
    _print_table(config, quotas, options, record)
    return quotas


def _is_cut_short(quotas: Sequence[Quota], record: TeacherRecord) -> bool:
    """Return True if the teacher's budget has ended before there are enough successes."""
    return record.is_spent and any(quota.missing for quota in quotas)


def _why_none(quotas: Sequence[Quota], record: TeacherRecord | None) -> str:
    """Return why there is no success."""
    if record is not None and record.is_spent:
        return record.budget
    if record is not None and not any(quota.episodes for quota in quotas):
        return (
            f"this teacher has played every seed that is tried, at earlier starts ({record.path} says how they ended); "
            "change [teacher], or remove that file"
        )
    reasons = Counter[str]()
    for quota in quotas:
        reasons.update(quota.reasons)
    return reasons.most_common(1)[0][0] if reasons else "every episode failed"


def collected_tasks(config: Config, options: CollectOptions) -> list[Task]:
    """Return the tasks that are played. Raises TaskError for a task that is unknown or held out."""
    if not options.tasks:
        return training_tasks(config)
    heldout_ids = {task.id for task in heldout_tasks(config)}
    others = [task for task in tasks_of(config.env.suite) if task.id not in heldout_ids]
    tasks = select_tasks(config.env.suite, options.tasks, others)
    for task in tasks:
        if task.id in heldout_ids:
            raise TaskError(f"--task {task.id} is held out: it is never trained on")
    return tasks


# --- playing ---------------------------------------------------------------------------------


Keep = Callable[[Trajectory], None]
"""Keeps one success."""


def _collect(
    config: Config,
    options: CollectOptions,
    quotas: Sequence[Quota],
    keep: Keep,
    record: TeacherRecord | None,
) -> int:
    """Play until all quotas are done, or a signal comes; return the exit code of the signal, else 0."""
    waits, missing = OpenWaits(), sum(quota.missing for quota in quotas)
    most = missing
    if record is not None and config.teacher.url:
        most = min(most, config.teacher.concurrent)
    with contextlib.ExitStack() as bar:
        advance = bar.enter_context(progress("collecting", missing, "successes"))

        def on_end(episode: PlayedEpisode) -> None:
            if record is not None:
                task, seed = episode.task.id, episode.planned.seed
                record.end_episode(episode.planned.name, task, seed, episode.end.outcome)

        async def play_all() -> None:
            async with _open_player(config, options, waits, record) as policy_of:
                await play_quotas(
                    config,
                    quotas,
                    policy_of,
                    options.source,
                    keep,
                    advance,
                    waits,
                    most=most,
                    is_over=lambda: record is not None and record.is_spent,
                    on_end=on_end,
                )

        def print_stopped() -> None:
            bar.close()
            _print_table(config, quotas, options, record, is_stopped=True)

        return run_until_stopped(play_all(), waits, print_stopped)


@contextlib.asynccontextmanager
async def _open_player(
    config: Config, options: CollectOptions, waits: OpenWaits, record: TeacherRecord | None
) -> AsyncIterator[PolicyOf]:
    """Yield a function that returns the policy of an episode. A model stays loaded during the block."""
    action_spec = action_spec_of(config)
    if options.player != "policy":
        with waits.waiting("the tokenizer to load"):
            encoder = await asyncio.to_thread(load_prompt_encoder, config)
        writer = ActionWriter(encoder, action_spec, config.rollout.max_tokens)
        if record is None:
            yield lambda env, _: OraclePolicy(env, writer)
            return
        async with open_teacher(config, record, writer, waits, hints=options.hints) as policy_of:
            yield policy_of
        return
    directory, version = chosen_weights(config, options.weights)
    async with loaded_model(config, directory, version, waits=waits) as model:
        if options.hints:
            yield lambda env, _: HintedPolicy(model.responder, env, action_spec)
        else:
            yield answered_by(config, model.responder)


async def play_quotas(
    config: Config,
    quotas: Sequence[Quota],
    policy_of: PolicyOf,
    source: PoolSource,
    keep: Keep,
    advance: Callable[[int], None] = lambda _: None,
    waits: OpenWaits | None = None,
    *,
    most: int | None = None,
    is_over: Callable[[], bool] = lambda: False,
    on_end: Callable[[PlayedEpisode], None] = lambda _: None,
) -> None:
    """Play until every quota is filled or has no seed left. Each success is kept at once.

    `advance(1)` is called after each success, and `on_end` after each episode. At most `most` episodes are
    played at once. None begins once `is_over`. Raises what `keep` raises.
    """
    changed = asyncio.Event()
    by_task = {quota.task.id: quota for quota in quotas}

    async def next_episode() -> PlannedEpisode | None:
        while True:
            quota = next((quota for quota in quotas if quota.wants_more), None)
            if quota is not None and not is_over():
                task, seed = quota.task, quota.next_seed()
                changed.set()
                return PlannedEpisode(task, seed, name=f"{task.id}#{seed}")
            if not any(quota.in_play for quota in quotas):
                changed.set()
                return None
            changed.clear()
            await changed.wait()

    def count(episode: PlayedEpisode) -> None:
        by_task[episode.task.id].add_episode(episode.end)
        changed.set()
        if episode.end.outcome == "pass":
            keep(_trajectory(episode, source))
            advance(1)
        on_end(episode)

    at_once = sum(quota.missing for quota in quotas) if most is None else most
    await play(config, next_episode, policy_of, count, most=at_once, name="collect", waits=waits)


def _trajectory(episode: PlayedEpisode, source: PoolSource) -> Trajectory:
    """Return a played episode as a trajectory of the pool."""
    lease, end = episode.lease, episode.end
    return Trajectory(
        id=lease.trajectory_id,
        suite=lease.suite,
        task_id=lease.task_id,
        task_seed=lease.task_seed,
        instruction=episode.instruction,
        source=source,
        origin="",
        outcome=end.outcome,
        reward=end.reward,
        verdict_reason=end.reason,
        stop_reason=end.stop_reason,
        app_log="\n".join(end.app_log),
        steps=[_step(record) for record in episode.records],
        images={content_hash(record.screenshot): record.screenshot for record in episode.records},
        final_screenshot=end.screenshot,
    )


def _step(record: StepRecord) -> StepRow:
    """Return a step as the store has it."""
    common = {field.name for field in fields(StepRow)} & set(StepRecord.model_fields)
    values = {name: getattr(record, name) for name in common}
    values["prompt_token_ids"] = record.prompt_token_ids.tolist()
    values["screenshot"] = record.image_hashes[-1]
    return StepRow(**values, at=time.time())


# --- where successes are kept ----------------------------------------------------------------


@contextlib.contextmanager
def _into_pool(config: Config) -> Iterator[tuple[set[tuple[str, str, int]], Keep]]:
    """Yield the successes that the pool of the run has, and a function that adds one."""
    try:
        store = open_store(config.run.dir)
    except RunDirectoryError as error:
        raise RunDirectoryError(
            f"{error}; or collect into a folder with --out and import it at the next start "
            "(data.pool)"
        ) from None
    with store:

        def keep(trajectory: Trajectory) -> None:
            join(store, trajectory, at=time.time())
            store.commit()

        yield {_key(row) for row in store.pool(evicted=True)}, keep


def _key(row: PoolRow) -> tuple[str, str, int]:
    """Return the source, task and seed of a member of the pool."""
    return row.source, row.task_id, row.task_seed


@contextlib.contextmanager
def _into_folder(config: Config, out: Path) -> Iterator[tuple[set[tuple[str, str, int]], Keep]]:
    """Yield the same as `_into_pool`, for a folder like one of `dart data export`; it appears at the end."""
    facts = model_facts(config)
    about = {"run": "", "vocabulary": "" if facts is None else facts.fingerprint}
    with write_folder(out, about) as shards:

        def keep(trajectory: Trajectory) -> None:
            shards.add(replace(trajectory, id=content_id(trajectory)))

        yield set(), keep


@contextlib.contextmanager
def _record(config: Config, options: CollectOptions) -> Iterator[TeacherRecord]:
    """Yield the record of the teacher in the run directory."""

    def digest(path: str) -> str:
        sys.stderr.write(f"reading {path}\n")  # every byte, which takes minutes for a large model
        sys.stderr.flush()
        return folder_digest(model_folder(path))

    player = teacher_id(config, digest, hints=options.hints)
    with contextlib.closing(TeacherRecord(config.run.dir / FILE, player, config.teacher)) as record:
        yield record


def _partial(out: Path) -> Path:
    """Return the run directory in which a collection for the folder `out` goes on."""
    return out.with_name(f"{out.name}.partial")


def _write_folder(config: Config, out: Path) -> None:
    """Write the pool of an unfinished collection as the folder `out`, and remove the collection."""
    with open_reader(config.run.dir) as reader:
        export_run(reader, select_ids(reader, Selection(pool=True)), out, config=config)
    shutil.rmtree(config.run.dir, ignore_errors=True)


# --- printing --------------------------------------------------------------------------------


def summary(
    config: Config,
    quotas: Sequence[Quota],
    out: Path | None,
    record: TeacherRecord | None = None,
) -> dict[str, object]:
    """Return the counts of each task as plain values, for `--json`."""
    return {
        "into": str(out or config.run.dir),
        "collected": sum(quota.successes - quota.existing for quota in quotas),
        "there": sum(quota.existing for quota in quotas),
        "missing": sum(quota.missing for quota in quotas),
        "tasks": {
            quota.task.id: {
                "collected": quota.successes - quota.existing,
                "there": quota.existing,
                "played": quota.episodes,
                "missing": quota.missing,
                "reasons": dict(quota.reasons),
            }
            for quota in quotas
        },
    } | ({} if record is None else {"teacher": record.summary()})


def _print_table(
    config: Config,
    quotas: Sequence[Quota],
    options: CollectOptions,
    record: TeacherRecord | None,
    *,
    is_stopped: bool = False,
) -> None:
    """Print the counts of each task as a table, or as one line of JSON."""
    out = options.out
    is_partial = record is not None and (is_stopped or _is_cut_short(quotas, record))
    into = config.run.dir if out is None or is_partial else out
    if options.as_json:
        result = summary(config, quotas, into, record) | {"stopped": is_stopped}
        sys.stdout.write(f"{json.dumps(result)}\n")
        return
    numbers = ("collected", "existing", "episodes", "missing")
    table = page_table(f"successes in {into}", "task", *numbers, right=numbers)
    for quota in quotas:
        new = quota.successes - quota.existing
        table.add_row(
            quota.task.id, *map(str, (new, quota.existing, quota.episodes, quota.missing))
        )
    console = Console(markup=False, highlight=False)
    console.print(table)
    for line in _notes(config, quotas, options, record, is_stopped=is_stopped):
        console.print(line, soft_wrap=True)


def _notes(
    config: Config,
    quotas: Sequence[Quota],
    options: CollectOptions,
    record: TeacherRecord | None,
    *,
    is_stopped: bool,
) -> Iterator[str]:
    """Yield the lines below the table."""
    if options.out is None and not config.data.pool_ratio:
        yield "data.pool_ratio = 0: the run does not draw from its pool; set it, e.g. to 0.125"
    is_cut = record is not None and _is_cut_short(quotas, record)
    for quota in quotas:
        if quota.missing and (quota.reasons or not (is_stopped or is_cut)):
            why = "; ".join(reason for reason, _ in quota.reasons.most_common(1))
            yield f"{quota.task.id}: {quota.missing} missing, {why or 'its other episodes failed'}"
    if record is None:
        return
    yield from record.lines()
    if is_cut:
        yield record.budget
    if options.out is not None and (is_stopped or is_cut):
        yield (
            f"{options.out} is not written yet: start the same command again to go on, or `dart data export "
            f"{config.run.dir} {options.out} --pool`"
        )
