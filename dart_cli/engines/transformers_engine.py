"""An engine over plain transformers: batched, exact, and able to change weights while it serves.

    generate         puts one request into the queue, and returns its completion
    worker thread    runs one forward pass after another: a prefill, or one token for all rows
    update_weights   checks the set first, then swaps the tensors between two passes
    interrupt        ends all waiting requests now, and all rows after the present pass

Batching is continuous (dart_cli.engines.batch): a request joins the running batch between two passes, and a
row that has ended, or that no caller awaits any more, is removed after the pass. Rows are bounded by
`max_batch` and by the memory of their keys and values; other requests wait in order of arrival. Tokens do not
depend on the rest of the batch (dart_cli.engines.sampling).

A request that begins like an earlier one, such as the next step of a trajectory, is prefilled from the token
on where they differ (dart_cli.engines.caches). Keys and values that other weights computed are never used for
this.

A swap keeps the keys and values of the tokens before it, although older weights computed them, as vLLM's
in-flight updates do. So no request waits longer than one pass, and nothing is computed twice. The version of
a token names the weights whose forward pass drew it. Its behaviour log-probability belongs to the
distribution that it was drawn from, mixed cache included; truncated importance sampling corrects for the
difference to the trainer's forward pass. A completion that continues from a partial is prefilled again, so
that its cache has one version again.

Temperature 0 is greedy and meant for evaluation: log-probabilities and entropies are then those of the
untempered distribution. At any temperature the forbidden tokens have probability 0.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from bus.errors import DartError, EngineError
from dart_cli.config.schema.rollout import KV_CACHE_MB, PREFIX_CACHE_MB
from dart_cli.engines.base import (
    CLOSED,
    UPDATE_DEADLINE_S,
    CompletionStop,
    GenerateRequest,
    Generation,
    LoadMeter,
    UpdateTiming,
)
from dart_cli.engines.batch import RunningBatch
from dart_cli.engines.caches import NO_VISION, FeatureCache, vision_digest
from dart_cli.engines.completions import CompletionBuilder
from dart_cli.engines.requests import ActiveRequest, JoinPolicy, RequestValidator
from dart_cli.hardware import accelerator
from dart_cli.hardware.device import check_memory
from dart_cli.policy.experts import RoutingShape
from dart_cli.policy.loader import LoadedPolicy, weight_tensors
from dart_cli.policy.weight_set import WeightSet

TensorLoader = Callable[[Path, Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Takes a directory and the model's tensors by name, and returns new ones; raises WeightsError if they do not
fit."""


@dataclass
class _Swap:
    """Checked new weights, which wait for the end of the present pass."""

    tensors: dict[str, torch.Tensor]
    policy_version: int
    vision: str | None  # digest of the vision tower
    future: Future[UpdateTiming] = field(default_factory=Future)


class TransformersEngine:
    """An Engine that serves one policy from a worker thread.

    The queue is bounded by the callers: the handlers of a Replier, or a player. `load_weights` reads and
    checks a published set (dart_cli.weights.file.load). An idle worker waits `linger_s` seconds for more
    requests after the first. `cache_bytes` bounds the keys and values of the batch (see RunningBatch),
    `prefix_bytes` those of earlier requests (0 keeps none), and `feature_bytes` the cached output of the
    vision tower. With `records_routing` its samples say which experts a mixture chose.
    """

    def __init__(
        self,
        policy: LoadedPolicy,
        *,
        policy_version: int = 0,
        load_weights: TensorLoader | None = None,
        max_batch: int = 64,
        linger_s: float = 0.001,
        cache_bytes: int = KV_CACHE_MB << 20,
        prefix_bytes: int = PREFIX_CACHE_MB << 20,
        feature_bytes: int = 256 * 2**20,
        records_routing: bool = False,
    ) -> None:
        self.policy = policy
        self._validator = RequestValidator(policy)
        self._version = policy_version
        self._load_weights = load_weights
        self._max_batch = max_batch
        self._linger_s = linger_s
        self._waiting: deque[ActiveRequest] = deque()
        self._swap: _Swap | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._running: list[ActiveRequest] = []  # in their prefill, or rows of the batch
        self._is_interrupted = False  # the running requests end after the present pass
        self._meter = LoadMeter(max_batch, serves=policy_version >= 0)
        self._tokens = 0
        self._prefills = 0
        self._finished = 0
        self._features = FeatureCache(feature_bytes)
        # Digest of the vision tower that serves; None if it is not known.
        self._vision = None if policy.lora is None else NO_VISION
        with check_memory("the engine's cache of keys and values", policy.device):
            self._batch = RunningBatch(
                policy,
                self._features,
                cache_bytes,
                prefix_bytes,
                routing=RoutingShape.of(policy.model) if records_routing else None,
            )
        self._join_policy = JoinPolicy()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @property
    def policy_version(self) -> int:
        """The version of the weights that serve now."""
        return self._version

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one completion.

        Raises EngineError if the prompt does not fit the model, or if its placeholders do not fit its images.
        Cancelling the awaiting task frees the request's slot.
        """
        [generation] = await self.generate_together([request])
        return generation

    async def generate_together(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Sample several completions, whose requests join the batch together if there is room for them.

        The last bits of logits depend on which requests share a pass, and on which prompts are cached. Two
        engines that get the same calls of this method in the same order, and no other requests, return the
        same numbers. Raises EngineError as `generate` does.
        """
        jobs = [
            ActiveRequest(
                request,
                CompletionBuilder(request.partial, request.pointed),
                self._validator.prepare(request),
                time.monotonic(),
            )
            for request in requests
        ]
        for job in jobs:
            stop = job.finished(self.policy.end_token_ids)
            if stop is not None:  # the partial is complete already
                job.future.set_result(job.generation(stop, 0.0, 0.0))
        self._enqueue([job for job in jobs if not job.future.done()])
        try:
            return await asyncio.gather(*(asyncio.wrap_future(job.future) for job in jobs))
        except (asyncio.CancelledError, EngineError):
            self._cancel(jobs)  # if one has failed, no caller awaits the others either
            raise

    def _enqueue(self, jobs: Sequence[ActiveRequest]) -> None:
        """Add all requests to the queue, or raise EngineError and add none."""
        with self._changed:
            if self._closing:
                raise EngineError(CLOSED)
            self._waiting.extend(jobs)
            self._changed.notify()

    def _cancel(self, jobs: Sequence[ActiveRequest]) -> None:
        """Remove requests that no caller awaits any more from the queue, and later from the batch."""
        with self._changed:
            for job in jobs:
                job.is_cancelled = True
            self._waiting = deque(job for job in self._waiting if not job.is_cancelled)

    async def update_weights(self, source: WeightSet, policy_version: int) -> UpdateTiming:
        """Load a weight set between two forward passes, without losing a request.

        Raises WeightsError if the set is incomplete or does not fit this model, and EngineError while another
        update is under way; the old weights then continue to serve. An error in the swap itself is raised
        unchanged, and the engine closes, because its tensors belong to two versions.
        """
        started = time.monotonic()
        expected = weight_tensors(self.policy.model)
        if not isinstance(source, Path):
            tensors = await asyncio.to_thread(source.load, expected)
        elif self._load_weights is not None:
            tensors = await asyncio.to_thread(self._load_weights, source, expected)
        else:
            raise EngineError("this engine was started without load_weights; its weights stay")
        swap = _Swap(tensors, policy_version, await asyncio.to_thread(vision_digest, source))
        with self._changed:
            if self._closing:
                raise EngineError(CLOSED)
            if self._swap is not None:
                raise EngineError("another weight update is under way; wait for it")
            self._swap = swap
            self._changed.notify()
        read_s = time.monotonic() - started
        async with asyncio.timeout(UPDATE_DEADLINE_S):
            timing = await asyncio.wrap_future(swap.future)
        return replace(timing, transfer_s=read_s)

    def interrupt(self) -> None:
        """End every waiting request now, and every running one after the present pass.

        Each returns its tokens so far, as `suspended` unless it is complete.
        """
        with self._changed:
            self._is_interrupted = bool(self._running)
            waiting = list(self._waiting)
            self._waiting.clear()
        now = time.monotonic()
        for job in waiting:
            if job.future.set_running_or_notify_cancel():
                job.future.set_result(job.builder.generation("suspended", now - job.arrived, 0.0))

    def gauges(self) -> dict[str, float]:
        """Return the load (in_flight, waiting), counts since the start, and LoadMeter's gauges.

        The counts are tokens, prefills, finished, and prompt_tokens = prefilled_tokens + cached_tokens.
        """
        prompts = self._batch.tokens
        with self._changed:
            return {
                "in_flight": float(len(self._running)),
                "waiting": float(len(self._waiting)),
                "tokens": float(self._tokens),
                "prefills": float(self._prefills),
                "finished": float(self._finished),
                "prompt_tokens": float(prompts.total),
                "prefilled_tokens": float(prompts.computed),
                "cached_tokens": float(prompts.cached),
                **self._meter.gauges(),
            }

    async def close(self) -> None:
        """Refuse waiting requests, fail the running ones after their pass, and stop the worker thread."""
        self._refuse_all()
        await asyncio.to_thread(self._thread.join, UPDATE_DEADLINE_S)

    def _refuse_all(self) -> None:
        """Accept no more requests, and fail those that wait."""
        with self._changed:
            self._closing = True
            refused = list(self._waiting)
            self._waiting.clear()
            self._changed.notify()
        for job in refused:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(EngineError(CLOSED))

    # --- the worker thread --------------------------------------------------------------------

    def _serve(self) -> None:
        """Run forward passes until closed; between two passes end rows, swap weights and admit requests."""
        while True:
            self._await_work()
            self._end_interrupted()
            if self._swap is not None:
                self._apply(self._swap)
                continue
            joiners = self._admit()
            if self._closing:
                self._fail(self._running, EngineError(CLOSED))
                return
            if self._running:
                self._pass(joiners)

    def _await_work(self) -> None:
        """Wait until there is something to do."""
        with self._changed:
            while not (self._running or self._waiting or self._closing or self._swap):
                self._changed.wait()

    def _admit(self) -> list[ActiveRequest]:
        """Return the requests that join now; none if it is better to go on with the running ones alone."""
        with self._changed:
            if self._waiting and not self._running:
                self._linger()
            slots = self._max_batch - len(self._running)
            count = self._batch.count_fitting(self._waiting, slots)
            if not self._join_policy.admits(count, len(self._running)):
                return []
            joiners = [self._waiting.popleft() for _ in range(count)]
            joiners = [job for job in joiners if job.future.set_running_or_notify_cancel()]
            for job in joiners:
                job.began = time.monotonic()
            self._running += joiners
            self._meter.run(len(self._running))
            return joiners

    def _linger(self) -> None:
        """Wait `linger_s` at most for more requests after the first."""
        deadline = time.monotonic() + self._linger_s
        while len(self._waiting) < self._max_batch and not self._closing:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not self._changed.wait(remaining):
                break

    def _pass(self, joiners: Sequence[ActiveRequest]) -> None:
        """Run the prefill of `joiners`, or draw one token for all rows if there are none."""
        concerned = joiners
        try:
            prefilled = self._batch.prefill(joiners, self._version) if joiners else []
            concerned = self._running  # a failure below concerns all rows, which share the cache
            for part in prefilled:
                self._batch.join(part)
            if not prefilled:
                self._batch.decode(self._version)
            self._end_complete(len(joiners) or len(self._running), len(prefilled))
        except Exception as error:  # noqa: BLE001 - raised to the callers concerned
            what = error if isinstance(error, DartError) else f"{type(error).__name__}: {error}"
            self._fail(concerned, EngineError(f"the batch of {len(concerned)} failed: {what}"))

    def _end_complete(self, tokens: int, prefills: int) -> None:
        """Count the tokens of a pass, and end the rows that are complete or that no caller awaits."""
        stops: dict[ActiveRequest, CompletionStop] = {}
        for job in self._running:
            stop = job.finished(self.policy.end_token_ids)
            if stop is not None or job.is_cancelled:
                stops[job] = stop or "suspended"
        with self._changed:
            self._tokens += tokens
            self._prefills += prefills
        self._end(stops)

    def _end_interrupted(self) -> None:
        """Suspend the requests that were running when `interrupt` was called."""
        with self._changed:
            is_interrupted, self._is_interrupted = self._is_interrupted, False
        if is_interrupted:
            self._end(dict.fromkeys(self._running, "suspended"))

    def _end(self, stops: Mapping[ActiveRequest, CompletionStop]) -> None:
        """Free the slots of these requests, then set their results."""
        self._batch.store_prefixes(stops)
        self._remove(stops)
        with self._changed:
            self._finished += sum(stop != "suspended" for stop in stops.values())
        now = time.monotonic()
        for job, stop in stops.items():
            job.future.set_result(job.generation(stop, job.began - job.arrived, now - job.began))

    def _fail(self, jobs: Sequence[ActiveRequest], error: EngineError) -> None:
        """Free the slots of these requests, then set `error` as their result."""
        failed = list(jobs)
        if len(failed) == len(self._running):
            self._batch.clear()  # a failed pass over all rows leaves them in an unknown state
        self._remove(dict.fromkeys(failed))
        for job in failed:
            job.future.set_exception(error)

    def _remove(self, jobs: Mapping[ActiveRequest, object]) -> None:
        """Free the slots of these requests. Call it before setting their results, so that gauges agree."""
        if not jobs:
            return
        self._batch.remove(jobs)
        with self._changed:
            self._running = [job for job in self._running if job not in jobs]
            self._meter.run(len(self._running))

    def _apply(self, swap: _Swap) -> None:
        """Put new weights in place, unless the caller of the update was cancelled."""
        halted = time.monotonic()
        with self._changed:
            self._swap = None
            if not swap.future.set_running_or_notify_cancel():
                return
            self._meter.halt()
        try:
            self._place(swap)
        except Exception as error:  # noqa: BLE001 - raised to the caller of update_weights
            self._refuse_all()
            swap.future.set_exception(error)
            return
        with self._changed:
            self._version = swap.policy_version
            self._meter.go()
        swap.future.set_result(UpdateTiming(0.0, time.monotonic() - halted))

    def _place(self, swap: _Swap) -> None:
        """Copy the tensors into the model, and drop what the old ones have computed."""
        with torch.no_grad():
            for name, tensor in weight_tensors(self.policy.model).items():
                tensor.copy_(swap.tensors[name])
        if accelerator.is_gpu(self.policy.device):
            accelerator.synchronize(self.policy.device)
        if swap.vision is None or swap.vision != self._vision:
            self._features.clear()
        self._vision = swap.vision
        self._batch.drop_prefixes()
        swap.tensors.clear()
