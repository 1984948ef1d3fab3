"""Successes for the experience pool, played in this process: `dart data collect`.

    run_collect   plays training tasks, keeps the successes, prints what there is now
    play_quotas   plays until each task has enough
    OraclePolicy  answers with the environment's own solution, in the policy's tokens
    HintedPolicy  samples from the policy, which sees the next step of the solution

Episodes are those of `dart env` (play_episode), so that a kept step has the prompt, the history and
the tokens that a rollout would have had. Seeds follow from run.seed and the task: a success that
exists already is neither played nor kept again.

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
from dataclasses import fields, replace
from pathlib import Path

from rich.console import Console

from bus.endpoints import make_private_dir
from bus.errors import ActionError, EngineError, RunDirectoryError, TaskError, UserError
from bus.messages import ActRequest, Completion, StepRecord
from bus.packed import int32s
from dart_cli.collect import CollectOptions
from dart_cli.collect.quotas import Quota
from dart_cli.config.schema import Config
from dart_cli.config.task_split import heldout_tasks, training_tasks
from dart_cli.data.checks import model_facts
from dart_cli.data.exchange.parquet_schema import Trajectory, content_id
from dart_cli.data.exchange.parquet_write import write_folder
from dart_cli.data.exchange.transfer import join
from dart_cli.data.store.open import open_store
from dart_cli.data.store.rows import PoolRow, PoolSource
from dart_cli.data.store.steps import StepRow
from dart_cli.engines.base import PromptEncoder, Responder
from dart_cli.env.async_env import AsyncEnv
from dart_cli.env.episode import ActionSpec, action_spec_of
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
from envs.contract.base import Task
from envs.contract.blobs import content_hash
from envs.contract.registry import select_tasks, tasks_of

logger = logging.getLogger(__name__)


def run_collect(config: Config, options: CollectOptions) -> list[Quota]:
    """Collect into the pool of the run, or into the folder --out, and print what it holds now.

    Where a signal stops it, it prints and keeps what was collected so far, and raises SystemExit. Raises
    TaskError, ConfigError without a GPU for the model, RunDirectoryError while the run is live, ExchangeError,
    UserError if there is no success at all.
    """
    tasks, out = collected_tasks(config, options), options.out
    limit_threads(config.rollout.threads)
    end_with_parent()
    if options.player != "oracle":
        take_gpus(config, "rollout", "collect-0")
    with contextlib.ExitStack() as stack:
        if out is None:
            make_private_dir(config.run.dir)
            stack.enter_context(logging_to(config.run.dir, "collect"))
        existing, keep = stack.enter_context(
            _into_folder(config, out) if out else _into_pool(config)
        )
        quotas = [Quota(task, options, config.run.seed, config.env.seeds) for task in tasks]
        for quota in quotas:
            quota.skip(existing)
        stopped = 0
        if any(quota.missing for quota in quotas):
            stopped = _collect(config, options, quotas, keep)
        if not any(quota.kept for quota in quotas):
            if stopped:
                raise SystemExit(stopped)  # which makes no folder
            reasons = Counter[str]()
            for quota in quotas:
                reasons.update(quota.reasons)
            why = reasons.most_common(1)[0][0] if reasons else "every episode failed"
            raise UserError(f"no success was collected: {why}")
    if stopped:
        raise SystemExit(stopped)
    _print(config, quotas, out, options.as_json)
    return quotas


def collected_tasks(config: Config, options: CollectOptions) -> list[Task]:
    """Return the tasks that are played. Raises TaskError for one that is unknown or held out."""
    if not options.tasks:
        return training_tasks(config)
    held = {task.id for task in heldout_tasks(config)}
    free = [task for task in tasks_of(config.env.suite) if task.id not in held]
    found = select_tasks(config.env.suite, options.tasks, free)
    for task in found:
        if task.id in held:
            raise TaskError(f"--task {task.id} is held out: it is never trained on")
    return found


# --- playing ---------------------------------------------------------------------------------


Keep = Callable[[Trajectory], None]


def _collect(config: Config, options: CollectOptions, quotas: Sequence[Quota], keep: Keep) -> int:
    """Play until a signal comes or all is over; returns the exit code of the signal, else 0."""
    waits, missing = OpenWaits(), sum(quota.missing for quota in quotas)
    with contextlib.ExitStack() as shown:
        advance = shown.enter_context(progress("collecting", missing, "successes"))

        async def play_all() -> None:
            async with _player(config, options, waits) as policy_of:
                await play_quotas(config, quotas, policy_of, options.source, keep, advance, waits)

        def print_stopped() -> None:
            shown.close()
            _print(config, quotas, options.out, options.as_json, stopped=True)

        return run_until_stopped(play_all(), waits, print_stopped)


@contextlib.asynccontextmanager
async def _player(
    config: Config, options: CollectOptions, waits: OpenWaits
) -> AsyncIterator[PolicyOf]:
    """Yield the policies of the episodes; the model is loaded until the end of the block."""
    action_spec = action_spec_of(config)
    if options.player == "oracle":
        with waits.waiting("the tokenizer to load"):
            encoder = await asyncio.to_thread(load_prompt_encoder, config)
        yield lambda env, _: OraclePolicy(env, encoder, action_spec, config.rollout.max_tokens)
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
) -> None:
    """Play until every quota is filled or given up; each success is kept at once.

    `advance(1)` is called after each success. Raises what `keep` raises.
    """
    changed = asyncio.Event()
    by_task = {quota.task.id: quota for quota in quotas}

    async def next_episode() -> PlannedEpisode | None:
        while True:
            quota = next((each for each in quotas if each.wants_more), None)
            if quota is not None:
                task, seed = quota.task, quota.next_seed()
                changed.set()
                return PlannedEpisode(task, seed, name=f"{task.id}#{seed}")
            if not any(each.in_play for each in quotas):
                changed.set()
                return None
            changed.clear()
            await changed.wait()

    def ended(played: PlayedEpisode) -> None:
        by_task[played.task.id].ended(played.end)
        changed.set()
        if played.end.outcome == "pass":
            keep(_trajectory(played, source))
            advance(1)

    missing = sum(quota.missing for quota in quotas)
    await play(config, next_episode, policy_of, ended, most=missing, name="collect", waits=waits)


def _trajectory(played: PlayedEpisode, source: PoolSource) -> Trajectory:
    lease, end = played.lease, played.end
    return Trajectory(
        id=lease.trajectory_id,
        suite=lease.suite,
        task_id=lease.task_id,
        task_seed=lease.task_seed,
        instruction=played.instruction,
        source=source,
        origin="",
        outcome=end.outcome,
        reward=end.reward,
        verdict_reason=end.reason,
        stop_reason=end.stop_reason,
        steps=[_step(record) for record in played.records],
        images={content_hash(record.screenshot): record.screenshot for record in played.records},
        final_screenshot=end.screenshot,
    )


def _step(record: StepRecord) -> StepRow:
    """As the store has it."""
    alike = {each.name for each in fields(StepRow)} & set(StepRecord.model_fields)
    values = {name: getattr(record, name) for name in alike}
    values["prompt_token_ids"] = record.prompt_token_ids.tolist()
    values["screenshot"] = record.image_hashes[-1]
    return StepRow(**values, at=time.time())


# --- players that know the solution --------------------------------------------------------


class OraclePolicy:
    """Answers with the environment's own solution, as the policy would have written it."""

    def __init__(
        self, env: AsyncEnv, prompt_encoder: PromptEncoder, action_spec: ActionSpec, max_tokens: int
    ) -> None:
        self._env = env
        self._prompt_encoder = prompt_encoder
        self._action_spec = action_spec
        self._max_tokens = max_tokens

    async def act(self, request: ActRequest) -> Completion:
        """Return the next step of the solution. Raises EnvError, EngineError where it cannot be written."""
        action, _hint = await self._env.solve()
        coordinates = self._action_spec.coordinate_map_of(request.width, request.height)
        try:
            text = self._action_spec.action_parser.format(action, coordinates)
        except ActionError as error:
            raise EngineError(
                f"the policy's action parser cannot write the solution: {error}"
            ) from error
        sampled = self._prompt_encoder.encode_completion(text, request)
        if len(sampled) > self._max_tokens:
            raise EngineError(
                f"the solution {text[:60]!r} takes {len(sampled)} tokens, "
                f"rollout.max_tokens = {self._max_tokens}"
            )
        return Completion(
            prompt_token_ids=int32s(self._prompt_encoder.encode_prompt(request)),
            sampled=sampled,
            text=text,
            stop="end",
            queue_s=0.0,
            engine_s=0.0,
        )


class HintedPolicy:
    """Answers as the policy samples when it sees the next step; the prompt returned is without it."""

    def __init__(self, responder: Responder, env: AsyncEnv, action_spec: ActionSpec) -> None:
        self._responder = responder
        self._env = env
        self._action_spec = action_spec

    async def act(self, request: ActRequest) -> Completion:
        """Return a completion under the hint. Raises EnvError, EngineError."""
        instruction = await self._hinted(request)
        hinted = request.model_copy(update={"instruction": instruction})
        completion = await self._responder.answer(hinted)
        plain_prompt = self._responder.prompt_encoder.encode_prompt(request)
        return completion.model_copy(update={"prompt_token_ids": int32s(plain_prompt)})

    async def _hinted(self, request: ActRequest) -> str:
        """Return the instruction that names the next step: in words, else as the action's text."""
        action, hint = await self._env.solve()
        if hint:
            return hint
        coordinates = self._action_spec.coordinate_map_of(request.width, request.height)
        try:
            text = self._action_spec.action_parser.format(action, coordinates)
        except ActionError:
            return request.instruction
        return f"{request.instruction}\nNext: {text}"


# --- where successes are kept ----------------------------------------------------------------


@contextlib.contextmanager
def _into_pool(config: Config) -> Iterator[tuple[set[tuple[str, str, int]], Keep]]:
    """(successes that exist already, what keeps one more): the pool of the run."""
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
    """Yield what `_into_pool` does, for a folder as `dart data export` writes it; it appears at the end."""
    facts = model_facts(config)
    about = {"run": "", "vocabulary": "" if facts is None else facts.fingerprint}
    with write_folder(out, about) as shards:

        def keep(trajectory: Trajectory) -> None:
            shards.add(replace(trajectory, id=content_id(trajectory)))

        yield set(), keep


# --- printing --------------------------------------------------------------------------------


def summary(config: Config, quotas: Sequence[Quota], out: Path | None) -> dict[str, object]:
    """Return what was collected, for `--json`."""
    return {
        "into": str(out or config.run.dir),
        "collected": sum(quota.kept - quota.existing for quota in quotas),
        "there": sum(quota.existing for quota in quotas),
        "missing": sum(quota.missing for quota in quotas),
        "tasks": {
            quota.task.id: {
                "collected": quota.kept - quota.existing,
                "there": quota.existing,
                "played": quota.played,
                "missing": quota.missing,
                "reasons": dict(quota.reasons),
            }
            for quota in quotas
        },
    }


def _print(
    config: Config,
    quotas: Sequence[Quota],
    out: Path | None,
    as_json: bool,
    *,
    stopped: bool = False,
) -> None:
    if as_json:
        found = summary(config, quotas, out) | {"stopped": stopped}
        sys.stdout.write(f"{json.dumps(found)}\n")
        return
    numbers = ("collected", "existing", "episodes", "missing")
    table = page_table(f"successes in {out or config.run.dir}", "task", *numbers, right=numbers)
    for quota in quotas:
        new = quota.kept - quota.existing
        table.add_row(quota.task.id, *map(str, (new, quota.existing, quota.played, quota.missing)))
    console = Console(markup=False, highlight=False)
    console.print(table)
    if out is None and not config.data.pool_ratio:
        console.print(
            "data.pool_ratio = 0: the run does not draw from its pool; set it, e.g. 0.125"
        )
    for quota in quotas:
        if quota.missing and (quota.reasons or not stopped):
            why = "; ".join(reason for reason, _ in quota.reasons.most_common(1))
            console.print(
                f"{quota.task.id}: {quota.missing} missing, {why or 'its other episodes failed'}",
                soft_wrap=True,
            )
