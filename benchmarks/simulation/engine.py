"""An engine with the timing of a GPU replica and no computation: to measure scheduling.

    timed_engine     what `rollout.engine` names
    TimedEngine      an Engine around a simulated Replica (gpu.py); one timer, no sleep per token
    TimedReply       the answer to one prompt, and for how many iterations it decodes
    random_replies   clicks anywhere, with a thought that fills the sampled length

Everything but the arithmetic is real: requests queue, are batched, suspended and resumed, weight
sets are checked and loaded in flight, each token has its version. Times are those of times.py,
divided by their speed-up.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Literal

from benchmarks.simulation.gpu import Costs, Replica, SimulatedRequest, SimulatedSwap
from benchmarks.simulation.times import Times
from bus.errors import EngineError
from dart_cli.config.schema import Config
from dart_cli.engines.base import (
    GenerateRequest,
    Generation,
    Model,
    UpdateTiming,
)
from dart_cli.engines.completions import CompletionBuilder
from dart_cli.engines.scripted import ScriptedResponder
from dart_cli.language.coordinates import THOUSAND, CoordinateMap
from dart_cli.language.parsers import make_action_parser
from dart_cli.policy.weight_set import WeightSet, directory_of
from dart_cli.weights.manifest import check_announced, check_files
from envs.contract.actions import Click

CLOSED = "the timed engine is closed; start another rollout worker"
_FILLER = "I look at the screen and think about where to click next. "


@dataclass(frozen=True)
class TimedReply:
    """The answer to one prompt; a token is a byte of UTF-8.

    The iterations determine the time. If their number is not the length of the text, the tokens are
    spread evenly over them.
    """

    text: bytes
    iterations: int  # >= 1
    stop: Literal["end", "length"] = "end"


def check_complete(path: Path, policy_version: int) -> None:
    """Raise WeightsError unless the set at `path` is that version and complete."""
    check_files(path, check_announced(path, policy_version, ""))


TimedReplies = Callable[[GenerateRequest], TimedReply]
CheckWeights = Callable[[Path, int], object]
"""(directory, policy version): raises WeightsError for a set that is not whole."""


def timed_engine(config: Config) -> Model:
    """Return the engine of a configuration, with the times of its [env.options]; a token is a byte of UTF-8."""
    times = Times.of(config)
    replies = random_replies(config.policy.action_parser, times)
    engine = TimedEngine(replies, times, max_batch=config.rollout.max_batch)
    return Model(engine, ScriptedResponder(engine))


def random_replies(action_parser: str, times: Times) -> TimedReplies:
    """Return a function that clicks anywhere; position and length are drawn from the request's seed.

    The length is log-normal and capped by max_tokens; a thought fills the text up to it if the
    language has thoughts and the action is shorter.
    """
    language = make_action_parser(action_parser)
    coordinates = CoordinateMap(
        THOUSAND, THOUSAND, THOUSAND, THOUSAND
    )  # a screen as fine as the numbers
    median = math.log(times.completion_tokens)

    def answer(request: GenerateRequest) -> TimedReply:
        rng = Random(request.sampling.seed)
        where = Click(x=rng.randrange(THOUSAND), y=rng.randrange(THOUSAND))
        tokens = round(math.exp(rng.gauss(median, times.completion_sigma)))
        iterations = max(1, min(tokens, request.sampling.max_tokens))
        text = language.format(where, coordinates)
        missing = max(0, iterations - len(text))
        thought = (_FILLER * (missing // len(_FILLER) + 1))[:missing]
        text = language.format(where, coordinates, thought)
        most = request.sampling.max_tokens
        return TimedReply(
            text.encode("ascii")[:most], iterations, "length" if len(text) > most else "end"
        )

    return answer


@dataclass
class _TimedRequest:
    """One request and its tokens so far."""

    reply: TimedReply
    builder: CompletionBuilder
    iterations_before: int  # iterations of the tokens of its partial
    future: asyncio.Future[Generation]

    def tokens_after(self, iterations: int, *, suspended: bool = False) -> int:
        """Return the tokens after `iterations` further iterations, those of the partial included.

        If a token takes several iterations, a started one counts when the request is suspended: a
        partial holds whole tokens only, and a request that is suspended often must progress.
        """
        length, whole = len(self.reply.text), self.reply.iterations
        spread, rest = divmod(length * (self.iterations_before + iterations), whole)
        if suspended and iterations and rest and length < whole:
            spread += 1
        return min(max(len(self.builder), spread), length)


class TimedEngine:
    """An engine that only takes time; engines.base.Engine has the contract."""

    def __init__(
        self,
        answer: TimedReplies,
        times: Times,
        *,
        check_weights: CheckWeights = check_complete,
        policy_version: int = -1,
        max_batch: int = 32,
    ) -> None:
        """Run at most `max_batch` requests together; the others wait in order of arrival."""
        self._answer = answer
        self._check_weights = check_weights
        self._transfer_s = times.transfer_s / times.speedup
        self._pause_s = times.pause_s / times.speedup
        self._replica = Replica(
            Costs.of(times), max_batch, version=policy_version, now=time.monotonic()
        )
        self._pending: dict[SimulatedRequest, _TimedRequest] = {}
        self._swap: tuple[SimulatedSwap, asyncio.Future[None]] | None = None
        self._updating = False
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf  # when the timer fires
        self._closed = False

    @property
    def policy_version(self) -> int:
        """The version of the weight set that serves now."""
        return self._replica.version

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the simulated completion. Raises EngineError; cancelling frees the slot."""
        if self._closed:
            raise EngineError(f"{request.request_id}: {CLOSED}")
        reply, builder = self._answer(request), CompletionBuilder(request.partial)
        if len(builder) >= len(reply.text):
            return builder.generation(reply.stop, 0.0, 0.0)
        iterations_before = math.ceil(len(builder) * reply.iterations / len(reply.text))
        trajectory = request.request_id.rpartition("/")[0]
        job = self._replica.submit(
            time.monotonic(), trajectory, reply.iterations - iterations_before
        )
        pending = _TimedRequest(
            reply, builder, iterations_before, asyncio.get_running_loop().create_future()
        )
        self._pending[job] = pending
        self._poll()
        try:
            return await pending.future
        finally:
            if self._pending.pop(job, None) is not None:  # the caller was cancelled
                self._replica.cancel(time.monotonic(), job)
                self._poll()

    async def update_weights(self, source: WeightSet, policy_version: int) -> UpdateTiming:
        """Load a complete set while requests run. Raises WeightsError, EngineError."""
        if self._updating:
            raise EngineError("another weight update is under way; wait for it")
        self._updating = True
        began = time.monotonic()
        try:
            await asyncio.to_thread(self._check_weights, directory_of(source), policy_version)
            await asyncio.sleep(max(0.0, began + self._transfer_s - time.monotonic()))
            if self._closed:
                raise EngineError(CLOSED)
            received = time.monotonic()
            swap = self._replica.swap(received, policy_version, self._pause_s)
            over = asyncio.get_running_loop().create_future()
            self._swap = swap, over
            self._poll()
            await over
        finally:
            self._updating = False
        assert swap.halted is not None
        assert swap.ended_at is not None
        return UpdateTiming(transfer_s=received - began, pause_s=swap.ended_at - swap.halted)

    def interrupt(self) -> None:
        """End every request now, as `suspended`; a pause for new weights continues."""
        for job in self._replica.interrupt(time.monotonic()):
            self._resolve(job, "suspended")
        self._poll()

    def gauges(self) -> dict[str, float]:
        """Return the load for the heartbeat: in_flight, waiting, tokens, prefills, and LoadMeter's."""
        self._poll()
        return self._replica.gauges()

    async def close(self) -> None:
        """Cancel all requests; waiting callers get an EngineError."""
        self._closed = True
        futures: list[asyncio.Future[Any]] = [pending.future for pending in self._pending.values()]
        if self._swap is not None:
            futures.append(self._swap[1])
        for future in futures:
            if not future.done():
                future.set_exception(EngineError(CLOSED))
        if self._timer is not None:
            self._timer.cancel()

    # --- the timer ----------------------------------------------------

    def _poll(self) -> None:
        """Resolve the requests that ended by now, and poll again when the next one ends."""
        for job in self._replica.advance(time.monotonic()):
            self._resolve(job)
        if self._swap is not None and self._swap[0].ended_at is not None:
            if not self._swap[1].done():
                self._swap[1].set_result(None)
            self._swap = None
        due = self._replica.next_event
        if self._timer is not None and self._due == due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due = None, due
        if math.isfinite(due) and not self._closed:
            wait_s = max(0.0, due - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._poll()

    def _resolve(self, job: SimulatedRequest, stop: Literal["suspended"] | None = None) -> None:
        """Resolve the future of `job` with the tokens of its iterations."""
        pending = self._pending.pop(job, None)
        if pending is None or pending.future.done():
            return
        builder, text = pending.builder, pending.reply.text
        end = pending.tokens_after(job.iterations, suspended=stop == "suspended")
        bounds = [*(pending.tokens_after(begin) for begin, _ in job.versions), end]
        versions = [
            version
            for (_, version), (begin, end) in zip(job.versions, pairwise(bounds), strict=True)
            for _ in range(begin, end)
        ]
        new = text[len(builder) : len(builder) + len(versions)]
        numbers = [0.0] * len(new)  # no other token could be drawn
        builder.extend(new, numbers, numbers, versions)
        pending.future.set_result(
            builder.generation(stop or pending.reply.stop, job.queue_s, job.engine_s)
        )
