"""The `dart data judge` command: a judge model judges the trajectories of a run that is over.

JudgeOptions   which judge, and which trajectories
judge_run      asks the judge about each trajectory that it has not judged yet
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bus.errors import EngineError, EnvError, UserError, first_line
from bus.messages import Judgement
from dart_cli.chat.server import MOST_FAILED
from dart_cli.config.rules import broken_rules
from dart_cli.config.rules.policy import JUDGE
from dart_cli.config.schema import Config, EnvConfig, JudgeConfig
from dart_cli.data.store.open import open_store
from dart_cli.data.store.rows import TrajectoryRow
from dart_cli.data.store.writer import Store
from dart_cli.judge.evidence import Evidence
from dart_cli.judge.judge import Judge, JudgeLimits
from dart_cli.runtime.background import run_until_stopped
from dart_cli.runtime.tables import Advance, progress
from dart_cli.runtime.waits import OpenWaits
from dart_cli.status.judges import judge_json

logger = logging.getLogger(__name__)

ENDED_BY_POLICY = ("done", "gave_up", "step_limit")
"""Stop reasons after which an episode is judged. After any other, the environment did not evaluate it."""


@dataclass(frozen=True)
class JudgeOptions:
    """The options of `judge_run`: the judge, and the trajectories that it judges."""

    run_dir: Path
    # Keys of [env.judge] that replace the run's.
    judge: Mapping[str, Any] = field(default_factory=dict)
    tasks: Sequence[str] = ()  # task ids; empty: all
    limit: int = 0  # number of trajectories, the newest ones; 0: all
    limits: JudgeLimits = field(default_factory=JudgeLimits)


def judge_run(options: JudgeOptions) -> dict[str, Any]:
    """Judge trajectories and store each verdict at once, so that a second start goes on.

    Returns the counts, and the agreement with the evaluators so far, as plain values; `stopped` is the exit
    code of the signal that stopped it, else 0. Raises UserError, RunDirectoryError while a data service
    serves the run, and EngineError if MOST_FAILED trajectories in a row got no answer.
    """
    with open_store(options.run_dir) as store:
        judge = _make_judge(store, options)
        judge.read_folder()
        already_judged = store.judged_by(judge.name)
        candidates = _candidates(store, options)
        left = [row for row in candidates if row.id not in already_judged]
        judged: list[str] = []
        left_out: dict[str, str] = {}
        waits = OpenWaits()
        judging = _judge_all(store, judge, left, judged, left_out, waits)
        exit_code = run_until_stopped(judging, waits, lambda: None)
        views = [view for view in store.judge_views() if view.judge == judge.name]
    return {
        "judge": judge.name,
        "run": str(options.run_dir),
        "asked": len(judged),
        "before": len(candidates) - len(left),
        "left_out": left_out,
        "agreement": judge_json(views[0]) if views else None,
        "stopped": exit_code,
    }


def _make_judge(store: Store, options: JudgeOptions) -> Judge:
    """Return the judge of the run, with the keys of the options. Raises UserError for invalid keys."""
    env = json.loads(store.run().config).get("env", {})
    try:
        config = JudgeConfig.model_validate({**(env.get("judge") or {}), **options.judge})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"env.judge.{key}: {first['msg']}") from None
    for finding in broken_rules(JUDGE, Config(env=EnvConfig(judge=config))):
        raise UserError(str(finding))
    return Judge(config, options.limits)


def _candidates(store: Store, options: JudgeOptions) -> list[TrajectoryRow]:
    """Return the newest `limit` trajectories with a verdict on their final state, the oldest first."""
    rows = store.trajectories()
    if options.tasks:
        rows = [row for task in options.tasks for row in store.trajectories(task_id=task)]
    tasks = {task_id for _, task_id in store.instructions()}
    if unknown := [task for task in options.tasks if task not in tasks]:
        raise UserError(f"the run has no task {unknown[0]}; `dart data stats` lists its tasks")
    candidates = [
        row
        for row in rows
        if row.outcome in ("pass", "fail") and row.stop_reason in ENDED_BY_POLICY
    ]
    candidates.sort(key=lambda row: row.leased_at)
    return candidates[-options.limit :] if options.limit else candidates


async def _judge_all(
    store: Store,
    judge: Judge,
    rows: Sequence[TrajectoryRow],
    judged: list[str],
    left_out: dict[str, str],
    waits: OpenWaits,
) -> None:
    """Judge trajectories and store the verdicts.

    Adds each trajectory to `judged`, or to `left_out` with the reason why the judge could not see it.
    """
    waiting = deque(rows)
    failed = 0  # in a row

    async def work(advance: Advance) -> None:
        nonlocal failed
        while waiting:
            row = waiting.popleft()
            try:
                evidence = _evidence(store, judge, row)
            except EnvError as error:
                left_out[row.id] = first_line(error)
                advance(1)
                continue
            with waits.waiting(
                f"judge {judge.name} to answer of {row.id}", judge.limits.deadline_s
            ):
                judgement = await judge.judge(evidence, "later")
            _store_judgement(store, row.id, judgement)
            judged.append(row.id)
            failed = failed + 1 if judgement.outcome == "invalid" else 0
            if failed >= MOST_FAILED:
                raise EngineError(
                    f"{MOST_FAILED} trajectories in a row got no answer; the last: {judgement.reason}"
                )
            advance(1)

    async with judge:
        with progress(f"judge {judge.name}", len(rows), "trajectories") as advance:
            workers = [
                asyncio.create_task(work(advance))
                for _ in range(min(len(rows), judge.limits.concurrent))
            ]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)


def _store_judgement(store: Store, trajectory_id: str, judgement: Judgement) -> None:
    """Store a judgement. One that replaces a judgement of the run itself keeps its `use`."""
    before = {row.judge: row for row in store.judgements(trajectory_id)}
    if (earlier := before.get(judgement.judge)) is not None:
        judgement = judgement.model_copy(update={"use": earlier.use})
    store.add_judgement(trajectory_id, judgement, time.time())
    store.commit()


def _evidence(store: Store, judge: Judge, row: TrajectoryRow) -> Evidence:
    """Return the evidence of a stored episode. Raises EnvError if its screenshots were removed."""
    [group] = store.groups_by_id([row.group_id]).values()
    steps = store.played_steps(row.id)
    hashes = [step.screenshot for step in steps]
    if row.final_screenshot is not None:
        hashes.append(row.final_screenshot)
    blobs = store.screenshots(hashes)
    if row.final_screenshot is None or not steps or len(blobs) < len(set(hashes)):
        raise EnvError("its screenshots are not in the database any more")
    evidence = judge.evidence(
        store.instruction(group.suite, group.task_id, [row.id]), blobs[hashes[0]]
    )
    for step, after in zip(steps, hashes[1:], strict=True):
        evidence.add(step.actions, blobs[after])
    return evidence
