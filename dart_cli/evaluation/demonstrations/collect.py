"""Successes for the experience pool, played in this process: `dart data collect`.

    run_collect   plays training tasks, keeps the successes, tells what there is now
    CollectOptions        how many successes of which tasks, and who plays
    Quota         one task's: which seed is tried next, and when enough is kept
    OracleSeat    an episode's policy: the environment's own solution, in the policy's tokens
    HintedSeat    an episode's policy: an engine that is told the next step and samples it

Episodes are those of `dart env` (play_episode), so that a kept step has the prompt, the history and
the tokens that a rollout would have had. Seeds follow from run.seed and the task: collected again,
what is there already is neither played nor kept twice.

The oracle's tokens were sampled by no policy: their log-probabilities are unknown. A policy's are
those of the distribution they were sampled from, with the hint in the prompt; the stored prompt is
without it. The ratio pi(a | s) / mu(a | s, hint) is then the importance weight of such a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from rich.console import Console

from bus.endpoints import make_private_dir
from bus.errors import ActionError, EngineError, RunDirectoryError, TaskError, UserError
from bus.messages import (
    Ack,
    ActRequest,
    Completion,
    Lease,
    Sampling,
    StepRecord,
    TrajectoryEnd,
)
from dart_cli.config.schema import Config
from dart_cli.config.task_split import TRAIN_SEEDS, heldout_tasks, training_tasks
from dart_cli.data.exchange.compatibility import model_facts
from dart_cli.data.exchange.parquet_schema import Trajectory, content_id, write_folder
from dart_cli.data.exchange.transfer import join
from dart_cli.data.store.rows import PoolRow, PoolSource, StepRow
from dart_cli.data.store.writer import open_store
from dart_cli.engines.base import PromptEncoder, Responder
from dart_cli.env.calls import Hosted
from dart_cli.env.episode import ActionSpec, conventions_of, play_episode
from dart_cli.evaluation.held_out import chosen_weights, environment, take_weights
from dart_cli.rollout.worker import load_model, load_prompt_encoder
from dart_cli.runtime.logs import logging_to
from dart_cli.runtime.progress import progress
from dart_cli.runtime.role import end_with_parent, limit_threads
from dart_cli.runtime.tables import page_table
from envs.base import Task, content_hash
from envs.registry import tasks_of
from envs.selection import select_tasks

logger = logging.getLogger(__name__)

TRIES = {"oracle": 2, "policy": 16}
"""Episodes played for each success wanted, at most."""

_STEP_SEEDS = 4096  # room between the sampling seeds of two episodes


@dataclass(frozen=True)
class CollectOptions:
    """What is collected."""

    per_task: int = 8  # successes
    tasks: tuple[str, ...] = ()  # empty for all that the run trains on
    player: Literal["oracle", "policy"] = "oracle"
    weights: Path | None = (
        None  # policy: a weight set; None for the run's newest, or the model's own
    )
    hints: bool = False  # policy: tell it the next step

    @property
    def source(self) -> PoolSource:
        """What the pool calls it."""
        return "oracle" if self.player == "oracle" else "demonstration"


def run_collect(
    config: Config, options: CollectOptions, *, out: Path | None = None, as_json: bool = False
) -> list[Quota]:
    """Collect into the pool of the run, or into the folder `out`, and print what there is now.

    Raises TaskError, RunDirectoryError while the run is live, ExchangeError, UserError if there is
    no success at all.
    """
    tasks = collected_tasks(config, options)
    limit_threads(config.rollout.threads)
    end_with_parent()
    with contextlib.ExitStack() as stack:
        if out is None:
            make_private_dir(config.run.dir)
            stack.enter_context(logging_to(config.run.dir, "collect"))
        there, keep = stack.enter_context(_into_folder(config, out) if out else _into_pool(config))
        quotas = [Quota(task, options, config.run.seed, config.env.seeds) for task in tasks]
        for quota in quotas:
            quota.skip(there)
        missing = sum(quota.missing for quota in quotas)
        told = stack.enter_context(progress("collecting", missing, "successes"))
        if missing:
            asyncio.run(_collect(config, options, quotas, keep, told))
        if not any(quota.kept for quota in quotas):
            reasons = Counter[str]()
            for quota in quotas:
                reasons.update(quota.reasons)
            why = reasons.most_common(1)[0][0] if reasons else "every episode failed"
            raise UserError(f"no success was collected: {why}")
    _tell(config, quotas, out, as_json)
    return quotas


def collected_tasks(config: Config, options: CollectOptions) -> list[Task]:
    """The tasks that are played. Raises TaskError for one that is unknown or held out."""
    if not options.tasks:
        return training_tasks(config)
    held = {task.id for task in heldout_tasks(config)}
    free = [task for task in tasks_of(config.env.suite) if task.id not in held]
    found = select_tasks(config.env.suite, options.tasks, free)
    for task in found:
        if task.id in held:
            raise TaskError(f"--task {task.id} is held out: it is never trained on")
    return found


# --- how much of what -----------------------------------------------------------------------


@dataclass
class Quota:
    """One task's share: `per_task` successes on the first seeds that give one.

    A seed is tried when all before it, tried or in play, cannot be enough. So what is kept depends
    on the outcomes alone, not on who finishes first.
    """

    task: Task
    options: CollectOptions
    run_seed: int
    seeds: Sequence[int] = (0, TRAIN_SEEDS)  # from the first up to, without, the second
    kept: int = 0  # successes, those that were there already among them
    there: int = 0
    played: int = 0
    in_play: int = 0
    tried: int = 0  # seeds
    reasons: Counter[str] = field(default_factory=Counter)  # of episodes that were invalid
    _there: set[int] = field(default_factory=set)  # seeds that are not to be played any more

    @property
    def missing(self) -> int:
        """Successes that are still wanted."""
        return max(0, self.options.per_task - self.kept)

    @property
    def wants_more(self) -> bool:
        """Whether another seed shall be tried now."""
        limit = TRIES[self.options.player] * self.options.per_task
        left = self.seeds[1] - self.seeds[0] - len(self._there)
        return self.kept + self.in_play < self.options.per_task and self.tried < limit and left > 0

    def skip(self, there: set[tuple[str, str, int]]) -> None:
        """Successes of (source, task, seed) are there already: they count, and are not played."""
        self._there = {
            seed
            for source, task_id, seed in there
            if (source, task_id) == (self.options.source, self.task.id)
            and self.seeds[0] <= seed < self.seeds[1]
        }
        limit = TRIES[self.options.player] * self.options.per_task
        seeds = {self._seed(number) for number in range(limit)}
        self.there = min(self.options.per_task, len(seeds & self._there))
        self.kept = self.there

    def next_seed(self) -> int:
        """The next seed to play; call only while it `wants_more`."""
        while True:
            seed = self._seed(self.tried)
            self.tried += 1
            if seed not in self._there:
                self._there.add(seed)  # of many seeds two are the same
                self.in_play += 1
                self.played += 1
                return seed

    def ended(self, end: TrajectoryEnd) -> None:
        """One of its episodes is over."""
        self.in_play -= 1
        self.kept += end.outcome == "pass"
        if end.outcome == "invalid":
            self.reasons[end.reason] += 1

    def _seed(self, number: int) -> int:
        return task_seed(self.run_seed, self.task.id, number, self.seeds)


def task_seed(
    run_seed: int, task_id: str, number: int, seeds: Sequence[int] = (0, TRAIN_SEEDS)
) -> int:
    """A training seed, in the range `seeds`, of the task's `number`-th instance."""
    digest = blake2b(f"collect/{run_seed}/{task_id}/{number}".encode(), digest_size=8).digest()
    return seeds[0] + int.from_bytes(digest) % (seeds[1] - seeds[0])


# --- playing --------------------------------------------------------------------------------


class _MemorySink:
    """One episode's sink; what it hands in is kept in memory."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    async def step(self, record: StepRecord) -> Ack:
        """Keep one step."""
        self.records.append(record)
        return Ack()

    async def end(self, end: TrajectoryEnd) -> Ack:
        """Nobody needs to be told: `play_episode` returns it."""
        logger.debug("%s: %s, %s", end.trajectory_id, end.outcome, end.reason)
        return Ack()


class OracleSeat(_MemorySink):
    """Answers with the environment's own solution, as the policy would have written it."""

    def __init__(
        self, env: Hosted, prompt_encoder: PromptEncoder, action_spec: ActionSpec, max_tokens: int
    ) -> None:
        super().__init__()
        self._env = env
        self._prompt_encoder = prompt_encoder
        self._action_spec = action_spec
        self._max_tokens = max_tokens

    async def act(self, request: ActRequest) -> Completion:
        """The next step of the solution. Raises EnvError, EngineError."""
        action, _hint = await self._env.solve()
        frame = self._action_spec.coordinate_map_of(request.width, request.height)
        try:
            text = self._action_spec.codec.format(action, frame)
        except ActionError as error:
            raise EngineError(f"the policy's language cannot say the solution: {error}") from error
        token_ids = self._prompt_encoder.write(text)
        if len(token_ids) > self._max_tokens:
            raise EngineError(
                f"the solution {text[:60]!r} takes {len(token_ids)} tokens, "
                f"rollout.max_tokens = {self._max_tokens}"
            )
        return Completion(
            prompt_token_ids=self._prompt_encoder.prompt(request),
            token_ids=token_ids,
            behaviour_logprobs=[],
            entropies=[],
            version_spans=[],
            text=text,
            stop="end",
            queue_s=0.0,
            engine_s=0.0,
        )


class PolicySeat(_MemorySink):
    """Answers as the policy samples."""

    def __init__(self, answers: Responder) -> None:
        super().__init__()
        self._answers = answers

    async def act(self, request: ActRequest) -> Completion:
        """What the policy says to one screen. Raises EngineError."""
        return await self._answers.answer(request)


class HintedSeat(PolicySeat):
    """Answers as the policy samples when it is told the next step, to the prompt without it."""

    def __init__(
        self,
        answers: Responder,
        env: Hosted,
        prompt_encoder: PromptEncoder,
        action_spec: ActionSpec,
    ) -> None:
        super().__init__(answers)
        self._env = env
        self._prompt_encoder = prompt_encoder
        self._action_spec = action_spec

    async def act(self, request: ActRequest) -> Completion:
        """A completion under the hint. Raises EnvError, EngineError."""
        instruction = await self._hinted(request)
        told = request.model_copy(update={"instruction": instruction})
        completion = await super().act(told)
        return completion.model_copy(
            update={"prompt_token_ids": self._prompt_encoder.prompt(request)}
        )

    async def _hinted(self, request: ActRequest) -> str:
        """The instruction that names the next step: in words, else as the action's text."""
        action, hint = await self._env.solve()
        if hint:
            return hint
        frame = self._action_spec.coordinate_map_of(request.width, request.height)
        try:
            text = self._action_spec.codec.format(action, frame)
        except ActionError:
            return request.instruction
        return f"{request.instruction}\nNext: {text}"


Keep = Callable[[Trajectory], None]
Seats = Callable[[Hosted], OracleSeat | PolicySeat]


async def _collect(
    config: Config,
    options: CollectOptions,
    quotas: Sequence[Quota],
    keep: Keep,
    told: Callable[[int], None],
) -> None:
    async with _seats(config, options) as seats:
        await play_quotas(config, quotas, seats, options.source, keep, told)


@contextlib.asynccontextmanager
async def _seats(config: Config, options: CollectOptions) -> AsyncIterator[Seats]:
    """What gives each episode its policy; the model is loaded meanwhile."""
    action_spec = conventions_of(config)
    if options.player == "oracle":
        prompt_encoder = await asyncio.to_thread(load_prompt_encoder, config)
        yield lambda env: OracleSeat(env, prompt_encoder, action_spec, config.rollout.max_tokens)
        return
    directory, version = chosen_weights(config, options.weights)
    model = await asyncio.to_thread(load_model, config)
    answers = model.responder
    try:
        if directory is not None:
            await take_weights(model.engine, directory, version)
        if options.hints:
            yield lambda env: HintedSeat(answers, env, answers.prompt_encoder, action_spec)
        else:
            yield lambda _env: PolicySeat(answers)
    finally:
        await model.engine.close()


async def play_quotas(
    config: Config,
    quotas: Sequence[Quota],
    seats: Seats,
    source: PoolSource,
    keep: Keep,
    told: Callable[[int], None] = lambda _: None,
) -> None:
    """Play until every quota is filled or given up; each success is kept as it comes."""
    action_spec = conventions_of(config)
    changed = asyncio.Event()

    async def play_some(slot: int) -> None:
        async with environment(config, f"collect/{slot}") as env:
            while True:
                quota = next((each for each in quotas if each.wants_more), None)
                if quota is not None:
                    end = await _play_one(env, quota)
                    if end.stop_reason == "environment":
                        await env.renew()
                    changed.set()
                elif any(each.in_play for each in quotas):
                    changed.clear()
                    await changed.wait()
                else:
                    changed.set()
                    return

    async def _play_one(env: Hosted, quota: Quota) -> TrajectoryEnd:
        seed = quota.next_seed()
        seat = seats(env)
        lease = _lease(config, quota.task, seed)
        end = await play_episode(env, lease, quota.task, seat, seat, action_spec)
        quota.ended(end)
        if end.outcome == "pass":
            keep(_trajectory(lease, quota.task, source, end, seat.records))
            told(1)
        return end

    slots = max(config.env.slots, config.rollout.max_batch)
    try:
        async with asyncio.TaskGroup() as group:
            for slot in range(min(slots, sum(quota.missing for quota in quotas))):
                group.create_task(play_some(slot))
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


def _lease(config: Config, task: Task, seed: int) -> Lease:
    """The lease that `dart data` would give."""
    return Lease(
        trajectory_id=f"{task.id}#{seed}",
        group_id="collect",
        suite=config.env.suite,
        task_id=task.id,
        task_seed=seed,
        max_steps=task.max_steps,
        sampling=Sampling(
            temperature=config.rollout.temperature,
            max_tokens=config.rollout.max_tokens,
            seed=(config.run.seed + 1) * 2**40 + seed * _STEP_SEEDS,
        ),
        expires_s=config.data.lease_s,
    )


def _trajectory(
    lease: Lease,
    task: Task,
    source: PoolSource,
    end: TrajectoryEnd,
    records: Sequence[StepRecord],
) -> Trajectory:
    return Trajectory(
        id=lease.trajectory_id,
        suite=lease.suite,
        task_id=lease.task_id,
        task_seed=lease.task_seed,
        instruction=records[0].instruction if records else task.instruction,
        source=source,
        origin="",
        outcome=end.outcome,
        verdict_reason=end.reason,
        stop_reason=end.stop_reason,
        steps=[_step(record) for record in records],
        images={content_hash(record.screenshot): record.screenshot for record in records},
        final_screenshot=end.screenshot,
    )


def _step(record: StepRecord) -> StepRow:
    return StepRow(
        trajectory_id=record.trajectory_id,
        step=record.step,
        at=time.time(),
        screenshot=record.image_hashes[-1],
        image_hashes=record.image_hashes,
        prompt_token_ids=record.prompt_token_ids,
        token_ids=record.token_ids,
        behaviour_logprobs=record.behaviour_logprobs,
        entropies=record.entropies,
        version_spans=record.version_spans,
        text=record.text,
        action=record.action,
        error=record.error,
        model_s=record.model_s,
        env_s=record.env_s,
        worker=record.worker,
        instruction=record.instruction,
    )


# --- where it goes --------------------------------------------------------------------------


@contextlib.contextmanager
def _into_pool(config: Config) -> Iterator[tuple[set[tuple[str, str, int]], Keep]]:
    """(what is there already, what keeps one more): the pool of the run."""
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
    return row.source, row.task_id, row.task_seed


@contextlib.contextmanager
def _into_folder(config: Config, out: Path) -> Iterator[tuple[set[tuple[str, str, int]], Keep]]:
    """The same: a folder as `dart data export` writes it, which appears at the end."""
    facts = model_facts(config)
    about = {"run": "", "vocabulary": "" if facts is None else facts.fingerprint}
    with write_folder(out, about) as shards:

        def keep(trajectory: Trajectory) -> None:
            shards.add(replace(trajectory, id=content_id(trajectory)))

        yield set(), keep


# --- telling --------------------------------------------------------------------------------


def summary(config: Config, quotas: Sequence[Quota], out: Path | None) -> dict[str, object]:
    """What was collected, for `--json`."""
    return {
        "into": str(out or config.run.dir),
        "collected": sum(quota.kept - quota.there for quota in quotas),
        "there": sum(quota.there for quota in quotas),
        "missing": sum(quota.missing for quota in quotas),
        "tasks": {
            quota.task.id: {
                "collected": quota.kept - quota.there,
                "there": quota.there,
                "played": quota.played,
                "missing": quota.missing,
                "reasons": dict(quota.reasons),
            }
            for quota in quotas
        },
    }


def _tell(config: Config, quotas: Sequence[Quota], out: Path | None, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(f"{json.dumps(summary(config, quotas, out))}\n")
        return
    numbers = ("collected", "there already", "episodes", "missing")
    table = page_table(f"successes in {out or config.run.dir}", "task", *numbers, right=numbers)
    for quota in quotas:
        new = quota.kept - quota.there
        table.add_row(quota.task.id, *map(str, (new, quota.there, quota.played, quota.missing)))
    console = Console(markup=False, highlight=False)
    console.print(table)
    if out is None and not config.data.pool_ratio:
        console.print(
            "data.pool_ratio = 0: the run does not draw from its pool; set it, e.g. 0.125"
        )
    for quota in quotas:
        if quota.missing:
            why = "; ".join(reason for reason, _ in quota.reasons.most_common(1))
            console.print(
                f"{quota.task.id}: {quota.missing} missing, {why or 'its other episodes failed'}",
                soft_wrap=True,
            )
