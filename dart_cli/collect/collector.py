"""The `dart data collect` command: plays training tasks in this process and keeps the successes.

    run_collect      plays training tasks, keeps the successes, prints a table
    collected_tasks  the tasks that are played
    play_quotas      plays until each task has enough successes
    OraclePolicy     answers with the environment's own solution, in the tokens of the policy
    HintedPolicy     samples from a policy whose prompt names the next step of the solution

Episodes are played as in `dart env` (play_episode), so that a kept step has the same prompt, history and
tokens as a step of a run. Seeds follow from run.seed and the task: a success that exists already is neither
played nor kept again.

No policy sampled the tokens of the oracle, so their log-probabilities are unknown. The tokens of a policy
have the log-probabilities of the distribution from which they were sampled, with the hint in the prompt;
the prompt is stored without the hint. So pi(a | s) / mu(a | s, hint) is the importance weight of such a
step.
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
from dart_cli.env.step_prompts import ActionSpec, action_spec_of
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
    """Collect successes into the pool of the run, or into the folder --out, and print a table.

    A signal ends the collection: the successes so far are kept and printed, and SystemExit is raised. Raises
    TaskError, ConfigError if there is no GPU for the model, RunDirectoryError while the run is live,
    ExchangeError, and UserError if there is no success at all.
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
        exit_code = 0
        if any(quota.missing for quota in quotas):
            exit_code = _collect(config, options, quotas, keep)
        if not any(quota.successes for quota in quotas):
            if exit_code:
                raise SystemExit(exit_code)  # within the block, so that no folder is made
            reasons = Counter[str]()
            for quota in quotas:
                reasons.update(quota.reasons)
            why = reasons.most_common(1)[0][0] if reasons else "every episode failed"
            raise UserError(f"no success was collected: {why}")
    if exit_code:
        raise SystemExit(exit_code)
    _print_table(config, quotas, out, options.as_json)
    return quotas


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


def _collect(config: Config, options: CollectOptions, quotas: Sequence[Quota], keep: Keep) -> int:
    """Play until all quotas are done, or a signal comes; return the exit code of the signal, else 0."""
    waits, missing = OpenWaits(), sum(quota.missing for quota in quotas)
    with contextlib.ExitStack() as bar:
        advance = bar.enter_context(progress("collecting", missing, "successes"))

        async def play_all() -> None:
            async with _open_player(config, options, waits) as policy_of:
                await play_quotas(config, quotas, policy_of, options.source, keep, advance, waits)

        def print_stopped() -> None:
            bar.close()
            _print_table(config, quotas, options.out, options.as_json, is_stopped=True)

        return run_until_stopped(play_all(), waits, print_stopped)


@contextlib.asynccontextmanager
async def _open_player(
    config: Config, options: CollectOptions, waits: OpenWaits
) -> AsyncIterator[PolicyOf]:
    """Yield a function that returns the policy of an episode. A model stays loaded during the block."""
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
    """Play until every quota is filled or has no seed left. Each success is kept at once.

    `advance(1)` is called after each success. Raises what `keep` raises.
    """
    changed = asyncio.Event()
    by_task = {quota.task.id: quota for quota in quotas}

    async def next_episode() -> PlannedEpisode | None:
        while True:
            quota = next((quota for quota in quotas if quota.wants_more), None)
            if quota is not None:
                task, seed = quota.task, quota.next_seed()
                changed.set()
                return PlannedEpisode(task, seed, name=f"{task.id}#{seed}")
            if not any(quota.in_play for quota in quotas):
                changed.set()
                return None
            changed.clear()
            await changed.wait()

    def on_end(episode: PlayedEpisode) -> None:
        by_task[episode.task.id].add_episode(episode.end)
        changed.set()
        if episode.end.outcome == "pass":
            keep(_trajectory(episode, source))
            advance(1)

    missing = sum(quota.missing for quota in quotas)
    await play(config, next_episode, policy_of, on_end, most=missing, name="collect", waits=waits)


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


# --- policies with the solution --------------------------------------------------------------


class OraclePolicy:
    """A policy that answers with the environment's own solution, in the action language of the policy."""

    def __init__(
        self, env: AsyncEnv, prompt_encoder: PromptEncoder, action_spec: ActionSpec, max_tokens: int
    ) -> None:
        self._env = env
        self._prompt_encoder = prompt_encoder
        self._action_spec = action_spec
        self._max_tokens = max_tokens

    async def act(self, request: ActRequest) -> Completion:
        """Return the next step of the solution. Raises EnvError, and EngineError if it cannot be written."""
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
    """A policy that samples with a hint on the next step in its prompt, and returns the prompt without it."""

    def __init__(self, responder: Responder, env: AsyncEnv, action_spec: ActionSpec) -> None:
        self._responder = responder
        self._env = env
        self._action_spec = action_spec

    async def act(self, request: ActRequest) -> Completion:
        """Return a completion that was sampled with the hint. Raises EnvError, EngineError."""
        instruction = await self._instruction_with_hint(request)
        hinted = request.model_copy(update={"instruction": instruction})
        completion = await self._responder.answer(hinted)
        plain_prompt = self._responder.prompt_encoder.encode_prompt(request)
        return completion.model_copy(update={"prompt_token_ids": int32s(plain_prompt)})

    async def _instruction_with_hint(self, request: ActRequest) -> str:
        """Return the instruction with the next step: the environment's hint, else the text of the action."""
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


# --- printing --------------------------------------------------------------------------------


def summary(config: Config, quotas: Sequence[Quota], out: Path | None) -> dict[str, object]:
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
    }


def _print_table(
    config: Config,
    quotas: Sequence[Quota],
    out: Path | None,
    as_json: bool,
    *,
    is_stopped: bool = False,
) -> None:
    """Print the counts of each task as a table, or as one line of JSON."""
    if as_json:
        result = summary(config, quotas, out) | {"stopped": is_stopped}
        sys.stdout.write(f"{json.dumps(result)}\n")
        return
    numbers = ("collected", "existing", "episodes", "missing")
    table = page_table(f"successes in {out or config.run.dir}", "task", *numbers, right=numbers)
    for quota in quotas:
        new = quota.successes - quota.existing
        table.add_row(
            quota.task.id, *map(str, (new, quota.existing, quota.episodes, quota.missing))
        )
    console = Console(markup=False, highlight=False)
    console.print(table)
    if out is None and not config.data.pool_ratio:
        console.print(
            "data.pool_ratio = 0: the run does not draw from its pool; set it, e.g. to 0.125"
        )
    for quota in quotas:
        if quota.missing and (quota.reasons or not is_stopped):
            why = "; ".join(reason for reason, _ in quota.reasons.most_common(1))
            console.print(
                f"{quota.task.id}: {quota.missing} missing, {why or 'its other episodes failed'}",
                soft_wrap=True,
            )
