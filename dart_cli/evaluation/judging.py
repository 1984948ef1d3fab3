"""`dart data judge`: a judge's opinion of the trajectories of a run that is over.

JudgeOptions   which judge, on which trajectories
judge_run      asks it about each that it has no opinion of; what came of it
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
from dart_cli.config.rules import broken_rules
from dart_cli.config.rules.policy import JUDGE
from dart_cli.config.schema import Config, EnvConfig, JudgeConfig
from dart_cli.data.store.open import open_store
from dart_cli.data.store.rows import TrajectoryRow
from dart_cli.data.store.writer import Store
from dart_cli.judge.chat import MOST_FAILED
from dart_cli.judge.evidence import Evidence
from dart_cli.judge.judge import Judge, JudgeLimits
from dart_cli.runtime.background import run_until_stopped
from dart_cli.runtime.tables import Advance, progress
from dart_cli.runtime.waits import OpenWaits
from dart_cli.status.page import judge_json

logger = logging.getLogger(__name__)

ENDED_BY_POLICY = ("done", "gave_up", "step_limit")
"""Stop reasons after which an evaluator was asked; a malformed or broken end needs no judge."""


@dataclass(frozen=True)
class JudgeOptions:
    """What is judged, and by whom."""

    run_dir: Path
    judge: Mapping[str, Any] = field(default_factory=dict)  # keys of [env.judge]; else the run's
    tasks: Sequence[str] = ()  # ids; empty for all
    limit: int = 0  # the newest so many; 0 for all
    limits: JudgeLimits = field(default_factory=JudgeLimits)


def judge_run(options: JudgeOptions) -> dict[str, Any]:
    """Judge and file, one by one, so that a second start goes on; the agreement with the evaluators so far.

    `stopped` in it is the exit code of a signal that stopped it, else 0.

    Raises UserError, RunDirectoryError while `dart data` serves the run, and EngineError once MOST_FAILED
    trajectories in a row had no answer.
    """
    with open_store(options.run_dir) as store:
        judge = _judge(store, options)
        judge.read_folder()
        done = store.judged_by(judge.name)
        wanted = _wanted(store, options)
        left = [row for row in wanted if row.id not in done]
        asked: list[str] = []
        left_out: dict[str, str] = {}
        waits = OpenWaits()
        judging = _judge_all(store, judge, left, asked, left_out, waits)
        stopped = run_until_stopped(judging, waits, lambda: None)
        views = [each for each in store.judge_views() if each.judge == judge.name]
    return {
        "judge": judge.name,
        "run": str(options.run_dir),
        "asked": len(asked),
        "before": len(wanted) - len(left),
        "left_out": left_out,
        "agreement": judge_json(views[0]) if views else None,
        "stopped": stopped,
    }


def _judge(store: Store, options: JudgeOptions) -> Judge:
    env = json.loads(store.run().config).get("env", {})
    try:
        config = JudgeConfig.model_validate({**(env.get("judge") or {}), **options.judge})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"env.judge.{key}: {first['msg']}") from None
    for found in broken_rules(JUDGE, Config(env=EnvConfig(judge=config))):
        raise UserError(str(found))
    return Judge(config, options.limits)


def _wanted(store: Store, options: JudgeOptions) -> list[TrajectoryRow]:
    """Those with a verdict that followed from the state at the end, the newest `limit`, oldest first."""
    rows = store.trajectories()
    if options.tasks:
        rows = [row for task in options.tasks for row in store.trajectories(task_id=task)]
    known = {task_id for _, task_id in store.instructions()}
    if strange := [task for task in options.tasks if task not in known]:
        raise UserError(f"the run has no task {strange[0]}; `dart data stats` lists its tasks")
    judged = [
        row
        for row in rows
        if row.outcome in ("pass", "fail") and row.stop_reason in ENDED_BY_POLICY
    ]
    judged.sort(key=lambda row: row.leased_at)
    return judged[-options.limit :] if options.limit else judged


async def _judge_all(
    store: Store,
    judge: Judge,
    rows: Sequence[TrajectoryRow],
    asked: list[str],
    left_out: dict[str, str],
    waits: OpenWaits,
) -> None:
    """Judge and file; adds trajectories to `asked`, or to `left_out` with why they could not be shown."""
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
                said = await judge.judge(evidence, "later")
            _file(store, row.id, said)
            asked.append(row.id)
            failed = failed + 1 if said.outcome == "invalid" else 0
            if failed >= MOST_FAILED:
                raise EngineError(
                    f"{MOST_FAILED} trajectories in a row had no answer; the last: {said.reason}"
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


def _file(store: Store, trajectory_id: str, said: Judgement) -> None:
    """Keep an opinion; what stands beside a verdict of the run itself stays as it was told then."""
    before = {row.judge: row for row in store.judgements(trajectory_id)}
    if (known := before.get(said.judge)) is not None:
        said = said.model_copy(update={"use": known.use})
    store.add_judgement(trajectory_id, said, time.time())
    store.commit()


def _evidence(store: Store, judge: Judge, row: TrajectoryRow) -> Evidence:
    """Return what the judge would have been shown. Raises EnvError where screens were removed."""
    [group] = store.groups_by_id([row.group_id]).values()
    steps = store.played_steps(row.id)
    hashes = [step.screenshot for step in steps]
    if row.final_screenshot is not None:
        hashes.append(row.final_screenshot)
    blobs = store.screenshots(hashes)
    if row.final_screenshot is None or not steps or len(blobs) < len(set(hashes)):
        raise EnvError("its screens are not in the database any more")
    evidence = judge.evidence(
        store.instruction(group.suite, group.task_id, [row.id]), blobs[hashes[0]]
    )
    for step, after in zip(steps, hashes[1:], strict=True):
        evidence.add(step.action, blobs[after])
    return evidence
