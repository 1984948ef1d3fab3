"""Policies that answer at once, and a sink in memory, for the tests of the environment process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from bus.errors import ActionError
from bus.messages import (
    Ack,
    ActRequest,
    Completion,
    Heartbeat,
    Lease,
    SampledTokens,
    Sampling,
    StepRecord,
    TrajectoryEnd,
    VersionSpan,
)
from dart_cli.env.async_env import AsyncEnv, Deadlines
from dart_cli.env.carriers import ThreadedEnv
from dart_cli.env.step_prompts import ActionSpec
from dart_cli.language.coordinates import CoordinateMap, make_coordinate_map
from dart_cli.language.history import History
from dart_cli.language.parsers import make_action_parser
from dart_cli.language.parsers.base import ActionParser
from envs.contract.actions import Action, Wait
from envs.contract.base import GuiEnv
from envs.contract.registry import make_env
from envs.suites.embedded.env import EmbeddedEnv

ACTION_PARSER = make_action_parser("compact")


def lease(task_id: str = "mini/menu", *, max_steps: int = 8, seed: int = 7) -> Lease:
    return Lease(
        trajectory_id=f"t-{seed}",
        group_id="g-1",
        suite="mini",
        task_id=task_id,
        task_seed=seed,
        max_steps=max_steps,
        sampling=Sampling(temperature=1.0, max_tokens=16, seed=1000),
    )


def action_spec(*, images: int = 1, turns: int = 0) -> ActionSpec:
    return ActionSpec(
        ACTION_PARSER,
        History(images=images, turns=turns),
        lambda width, height: make_coordinate_map("thousandths", width, height),
    )


class Lenient:
    """An action parser in which every text is an action: what another action parser does not read is a wait."""

    def __init__(self, action_parser: ActionParser = ACTION_PARSER) -> None:
        self._action_parser = action_parser

    def __getattr__(self, name: str) -> object:
        return getattr(self._action_parser, name)

    def parse(self, text: str, coordinates: CoordinateMap) -> Action:
        try:
            return self._action_parser.parse(text, coordinates)
        except ActionError:
            return Wait(seconds=0)


def completion(text: str, *, stop: Literal["end", "suspended"] = "end") -> Completion:
    tokens = list(text.encode())
    return Completion(
        prompt_token_ids=[1, 2, 3],
        sampled=SampledTokens(
            token_ids=tokens,
            behaviour_logprobs=[-0.5] * len(tokens),
            entropies=[0.5] * len(tokens),
            version_spans=[VersionSpan(version=4, start=0, end=len(tokens))],
        ),
        text=text,
        stop=stop,
        queue_s=0.25,
        engine_s=0.5,
    )


class Says:
    """A policy that answers with the given texts, then the last one forever."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.requests: list[ActRequest] = []

    async def act(self, request: ActRequest) -> Completion:
        self.requests.append(request)
        return completion(self.texts[min(len(self.requests), len(self.texts)) - 1])


class Oracle:
    """A policy that plays a shortest solution: it looks into the environment."""

    def __init__(self, env: EmbeddedEnv) -> None:
        self.env = env
        self.requests: list[ActRequest] = []

    async def act(self, request: ActRequest) -> Completion:
        self.requests.append(request)
        frame = make_coordinate_map("thousandths", request.width, request.height)
        return completion(ACTION_PARSER.format(self.env.oracle_action(), frame))


class Memory:
    """A sink in memory; `lost_from` is the step from which the lease is not ours any more."""

    def __init__(self, lost_from: int | None = None) -> None:
        self.steps: list[StepRecord] = []
        self.ends: list[TrajectoryEnd] = []
        self._lost_from = lost_from

    async def step(self, record: StepRecord) -> Ack:
        await asyncio.sleep(0)
        self.steps.append(record)
        if self._lost_from is not None and record.step >= self._lost_from:
            return Ack(accepted=False, note="expired")
        return Ack()

    async def end(self, end: TrajectoryEnd) -> Ack:
        self.ends.append(end)
        return Ack()


@dataclass(frozen=True)
class RecordedWait:
    """One reported wait: what for, on whom, and with which bounds."""

    what: str
    deadline_s: float | None
    on: str
    since: float | None


class RecordedWaits:
    """Records the waits that are reported, in order."""

    def __init__(self) -> None:
        self.all: list[RecordedWait] = []

    @property
    def texts(self) -> list[str]:
        """The texts of the waits; of equal neighbours only the first."""
        texts = [wait.what for wait in self.all]
        return [text for i, text in enumerate(texts) if texts[i - 1 : i] != [text]]

    @contextmanager
    def waiting(
        self,
        what: str,
        deadline_s: float | None = None,
        *,
        on: str = "",
        since: float | None = None,
    ) -> Iterator[None]:
        """Record a wait, with the arguments of telemetry's `waiting`."""
        self.all.append(RecordedWait(what, deadline_s, on, since))
        yield


def threaded(make: Callable[[], GuiEnv], *, deadline_s: float = 20.0) -> AsyncEnv:
    return AsyncEnv(ThreadedEnv(make, "env-0/0"), Deadlines(deadline_s, deadline_s, deadline_s))


def mini() -> EmbeddedEnv:
    env = make_env("mini")
    assert isinstance(env, EmbeddedEnv)
    return env


def heartbeat(
    worker: str, endpoint: str, *, state: str = "ready", in_flight: float = 0.0, version: int = 0
) -> Heartbeat:
    return Heartbeat(
        role="rollout",
        worker=worker,
        host="host",
        pid=1,
        started_at=0.0,
        sent_at=0.0,
        endpoint=endpoint,
        policy_version=version,
        state=state,
        waiting_for="",
        waiting_s=0.0,
        gauges={"in_flight": in_flight},
        trajectories=[],
    )
