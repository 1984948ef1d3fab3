"""An engine over plain transformers: batched, exact, and able to change weights while it serves.

    generate         a request joins the waiting line and gets its own future
    worker thread    takes what waits (up to `max_batch`), prefills and decodes it as one batch
    sampling         inverse of the cumulative distribution, one uniform number per token from a
                     Philox stream keyed by the request's seed: the batch it rides in is no matter
    update_weights   checks the set first, then swaps the tensors between two batches

Temperature 0 is greedy and meant for evaluation: its log-probabilities and entropies are those
of the untempered distribution. At any temperature the forbidden tokens have probability 0.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from bus.errors import DartError, EngineError
from bus.messages import VersionSpan
from dart_cli.engines.base import GenerateRequest, Generation, UpdateTiming
from dart_cli.policy.forward import (
    ImageFeatures,
    ModelInputs,
    image_features,
    logits,
    masked_logprobs,
)
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.model import LoadedPolicy, weight_tensors

WeightLoader = Callable[[Path, Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Directory and the model's tensors by name -> new ones; raises WeightsError if they do not fit."""

UPDATE_DEADLINE_S = 600.0
"""A weight set that is not in place after this long is an error: a batch never takes so long."""

CLOSED = "the engine is closed; start another rollout worker"


@dataclass
class _Job:
    """One request in the waiting line or in a batch."""

    request: GenerateRequest
    images: list[PreparedImage]
    arrived: float
    future: Future[Generation] = field(default_factory=Future)
    given_up: bool = False  # nobody awaits it any more; its row may end early


@dataclass
class _Swap:
    """New weights, checked, waiting for the end of the present batch."""

    tensors: dict[str, torch.Tensor]
    policy_version: int
    future: Future[UpdateTiming] = field(default_factory=Future)


class TransformersEngine:
    """Serves one policy from a worker thread. Bounds: `max_waiting` requests may wait.

    `load_weights` reads and checks a published set (dart_cli.weights.file.load). `linger_s` is how
    long the worker waits for companions after the first request of a batch, `feature_bytes` how
    much of the vision tower's output is remembered.
    """

    def __init__(
        self,
        policy: LoadedPolicy,
        *,
        policy_version: int = 0,
        load_weights: WeightLoader | None = None,
        max_batch: int = 64,
        max_waiting: int = 4096,
        linger_s: float = 0.001,
        feature_bytes: int = 256 * 2**20,
    ) -> None:
        self.policy = policy
        self._version = policy_version
        self._load_weights = load_weights
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._linger_s = linger_s
        self._waiting: deque[_Job] = deque()
        self._swap: _Swap | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._in_flight = 0
        self._busy_s = 0.0
        self._tokens = 0
        self._batches = 0
        self._finished = 0
        self._started = time.monotonic()
        self._features = _FeatureCache(feature_bytes)
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @property
    def policy_version(self) -> int:
        """Version of the weights that serve now."""
        return self._version

    async def generate(self, request: GenerateRequest) -> Generation:
        """Draw one completion.

        Raises EngineError if the prompt does not fit the model, holds images without places, or
        the waiting line is full. Cancelling the awaiting task frees the request's place.
        """
        job = self._enqueue(request)
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            job.given_up = True
            raise

    def _enqueue(self, request: GenerateRequest) -> _Job:
        job = _Job(request, self._prepare(request), time.monotonic())
        with self._changed:
            if self._closing:
                raise EngineError(CLOSED)
            if len(self._waiting) >= self._max_waiting:
                raise EngineError(
                    f"{len(self._waiting)} requests wait already (max_waiting); "
                    "use fewer environment slots or more rollout workers"
                )
            self._waiting.append(job)
            self._changed.notify()
        return job

    async def update_weights(self, directory: Path, policy_version: int) -> UpdateTiming:
        """Take a published weight set between two batches; no request is lost.

        Raises WeightsError, with the old weights still serving, if the set is incomplete or does
        not fit this model.
        """
        started = time.monotonic()
        if self._load_weights is None:
            raise EngineError("this engine was started without load_weights; its weights stay")
        tensors = await asyncio.to_thread(
            self._load_weights, directory, weight_tensors(self.policy.model)
        )
        swap = _Swap(tensors, policy_version)
        with self._changed:
            if self._closing:
                raise EngineError(CLOSED)
            if self._swap is not None:
                raise EngineError("another weight update is under way; wait for it")
            self._swap = swap
            self._changed.notify()
        read_s = time.monotonic() - started
        timing = await asyncio.wait_for(asyncio.wrap_future(swap.future), UPDATE_DEADLINE_S)
        return replace(timing, transfer_s=read_s)

    def gauges(self) -> dict[str, float]:
        """Load: in_flight, waiting, busy_s, idle_s, and tokens, batches, finished since the start."""
        with self._changed:
            lived = time.monotonic() - self._started
            return {
                "in_flight": float(self._in_flight),
                "waiting": float(len(self._waiting)),
                "busy_s": self._busy_s,
                "idle_s": max(0.0, lived - self._busy_s),
                "tokens": float(self._tokens),
                "batches": float(self._batches),
                "finished": float(self._finished),
            }

    async def close(self) -> None:
        """Refuse what waits, give up the present batch at its next token, stop the worker thread."""
        with self._changed:
            self._closing = True
            refused = list(self._waiting)
            self._waiting.clear()
            self._changed.notify()
        for job in refused:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(EngineError(CLOSED))
        await asyncio.to_thread(self._thread.join, UPDATE_DEADLINE_S)

    # --- asking -----------------------------------------------------------------------------

    def _prepare(self, request: GenerateRequest) -> list[PreparedImage]:
        """Check a request against the model and prepare its images, in the caller's thread."""
        length = len(request.prompt_token_ids) + request.sampling.max_tokens
        if not request.prompt_token_ids:
            raise EngineError(f"request {request.request_id} has an empty prompt")
        if length > self.policy.max_positions:
            raise EngineError(
                f"request {request.request_id} needs {length} positions, the model has "
                f"{self.policy.max_positions}; show fewer past screens or turns"
            )
        images = [self.policy.images.prepare(encoded) for encoded in request.images]
        places = request.prompt_token_ids.count(self.policy.image_token_id)
        needed = sum(image.tokens for image in images)
        if places != needed:
            raise EngineError(
                f"request {request.request_id} has {places} image placeholders for images "
                f"that take {needed}; render the prompt with this model's renderer"
            )
        return images

    # --- the worker thread --------------------------------------------------------------------

    def _serve(self) -> None:
        """Take waiting requests, answer them, swap weights in between; repeat until closed."""
        while True:
            batch, swap = self._take()
            if swap is not None:
                self._apply(swap)
            elif not batch:
                return
            else:
                self._answer(batch)

    def _take(self) -> tuple[list[_Job], _Swap | None]:
        """The next batch or weight swap; neither once the engine is closed."""
        with self._changed:
            while True:
                while not (self._waiting or self._swap or self._closing):
                    self._changed.wait()
                if self._swap is not None:
                    return [], self._swap
                batch = self._companions()
                if batch or self._closing:
                    self._in_flight = len(batch)
                    return batch, None

    def _companions(self) -> list[_Job]:
        """What waits, after a moment for companions; requests given up meanwhile are dropped."""
        deadline = time.monotonic() + self._linger_s
        while len(self._waiting) < self._max_batch and not self._closing:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not self._changed.wait(remaining):
                break
        batch: list[_Job] = []
        while self._waiting and len(batch) < self._max_batch:
            job = self._waiting.popleft()
            if job.future.set_running_or_notify_cancel():
                batch.append(job)
        return batch

    def _apply(self, swap: _Swap) -> None:
        """Put new weights in place, unless whoever brought them has gone."""
        started = time.monotonic()
        is_wanted = swap.future.set_running_or_notify_cancel()
        if is_wanted:
            with torch.no_grad():
                for name, tensor in weight_tensors(self.policy.model).items():
                    tensor.copy_(swap.tensors[name])
            self._features.clear()
        with self._changed:
            self._swap = None
            if is_wanted:
                self._version = swap.policy_version
        if is_wanted:
            swap.future.set_result(UpdateTiming(0.0, time.monotonic() - started, 0.0))

    def _answer(self, batch: list[_Job]) -> None:
        started = time.monotonic()
        generations: list[Generation] = []
        fault: EngineError | None = None
        try:
            generations = self._decode(batch, started)
        except Exception as error:  # noqa: BLE001 - whatever it is, the batch is told; others follow
            what = error if isinstance(error, DartError) else f"{type(error).__name__}: {error}"
            fault = EngineError(f"the batch of {len(batch)} failed: {what}")
        with self._changed:  # before anyone is told, so that whoever is told can read the gauges
            self._in_flight = 0
            self._busy_s += time.monotonic() - started
            self._batches += 1
            self._finished += len(batch)
        for row, job in enumerate(batch):
            if fault is None:
                job.future.set_result(generations[row])
            else:
                job.future.set_exception(fault)

    @torch.inference_mode()
    def _decode(self, batch: list[_Job], started: float) -> list[Generation]:
        """Prefill and decode one batch until every row has ended."""
        policy, model = self.policy, self.policy.model
        inputs = policy.inputs_of(
            [job.request.prompt_token_ids for job in batch], [job.images for job in batch]
        )
        features = self._features.of(policy, inputs)
        draw = _Sampler(policy, [job.request for job in batch])
        cache = DynamicCache(config=model.config)
        values = logits(model, inputs, last=1, features=features, cache=cache)[:, 0]
        attention_mask = inputs.attention_mask
        position = inputs.next_position
        while draw.step(values, [job.given_up for job in batch]):
            if self._closing:
                raise EngineError(CLOSED)
            attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(batch), 1)], 1)
            step = ModelInputs(
                input_ids=draw.last[:, None],
                attention_mask=attention_mask,
                position_ids=position[None, :, None].expand(3, -1, -1),
                next_position=position + 1,
                images=(),
                shown=(),
            )
            position = position + 1
            values = logits(model, step, last=1, cache=cache)[:, 0]
        engine_s = time.monotonic() - started
        self._tokens += sum(len(tokens) for tokens in draw.tokens)
        return [
            Generation(
                token_ids=draw.tokens[row],
                behaviour_logprobs=draw.logprobs[row],
                entropies=draw.entropies[row],
                version_spans=[VersionSpan(version=self._version, start=0, end=len(tokens))],
                stop="end" if tokens[-1] in policy.end_token_ids else "length",
                queue_s=started - batch[row].arrived,
                engine_s=engine_s,
            )
            for row, tokens in enumerate(draw.tokens)
        ]


class _Sampler:
    """Draws one token per row and step, and keeps what was drawn until each row ends."""

    def __init__(self, policy: LoadedPolicy, requests: Sequence[GenerateRequest]) -> None:
        samplings = [request.sampling for request in requests]
        self._ends = frozenset(policy.end_token_ids)
        self._limits = [sampling.max_tokens for sampling in samplings]
        self._uniform: list[NDArray[np.float64]] = [
            np.random.Generator(np.random.Philox(sampling.seed)).random(sampling.max_tokens)
            for sampling in samplings
        ]
        temperatures = torch.tensor([sampling.temperature for sampling in samplings])
        self._greedy = (temperatures == 0).to(policy.device)
        divisor = torch.where(temperatures == 0, torch.ones_like(temperatures), temperatures)
        self._temperature = divisor.to(policy.device)[:, None]  # [B, 1]
        self._forbidden = policy.forbidden(policy.device)
        self._open = [True] * len(requests)
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.logprobs: list[list[float]] = [[] for _ in requests]
        self.entropies: list[list[float]] = [[] for _ in requests]
        self.last = torch.zeros(len(requests), dtype=torch.long)

    def step(self, values: torch.Tensor, given_up: Sequence[bool]) -> bool:
        """Draw from logits [B, V]; True while a row that was not given up [B] wants tokens."""
        logprobs = masked_logprobs(values, self._forbidden, self._temperature)
        probabilities = logprobs.double().exp()
        cumulative = probabilities.cumsum(dim=-1)
        index = len(max(self.tokens, key=len))
        uniform = torch.tensor(
            [row[index] if index < len(row) else 0.0 for row in self._uniform],
            dtype=torch.float64,
            device=values.device,
        )
        total = cumulative[:, -1:]
        if not bool(torch.isfinite(total).all()):
            raise EngineError("the model's logits are not numbers; are its weights finite?")
        # The first token whose cumulative probability exceeds the draw: its own is then > 0.
        goal = torch.minimum(uniform[:, None] * total, torch.nextafter(total, 0 * total))
        drawn = torch.searchsorted(cumulative, goal, right=True)[:, 0]
        drawn = torch.where(self._greedy, logprobs.argmax(dim=-1), drawn)
        picked = logprobs.gather(1, drawn[:, None])[:, 0].tolist()
        # A forbidden token's 0 * -inf would be nan; its share of the entropy is 0.
        shares = torch.where(probabilities > 0, probabilities * logprobs.double(), 0.0)
        entropies = (-shares.sum(dim=-1)).tolist()
        self.last = drawn.cpu()
        for row, token in enumerate(self.last.tolist()):
            if self._open[row]:
                self.tokens[row].append(token)
                self.logprobs[row].append(picked[row])
                self.entropies[row].append(entropies[row])
                ended = token in self._ends or len(self.tokens[row]) >= self._limits[row]
                self._open[row] = not (ended or given_up[row])
        return any(self._open)


class _FeatureCache:
    """Vision features of recent screens under the present weights, bounded in bytes.

    Used by the worker thread alone.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._entries: OrderedDict[str, tuple[torch.Tensor, ...]] = OrderedDict()

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self._entries.clear()
        self._held = 0

    def of(self, policy: LoadedPolicy, inputs: ModelInputs) -> ImageFeatures | None:
        """Features of `inputs.images`, computed together for those not held."""
        if not inputs.images:
            return None
        new = [image for image in inputs.images if image.key not in self._entries]
        fresh: dict[str, tuple[torch.Tensor, ...]] = {}
        if new:
            made = image_features(policy.model, new)
            for index, image in enumerate(new):
                fresh[image.key] = (
                    made.embeds[index].clone(),
                    *(level[index].clone() for level in made.deepstack),
                )
        rows = [
            fresh[image.key] if image.key in fresh else self._entries[image.key]
            for image in inputs.images
        ]
        for image, row in zip(inputs.images, rows, strict=True):
            if image.key not in self._entries:
                self._entries[image.key] = row
                self._held += _nbytes(row)
            self._entries.move_to_end(image.key)
        while self._held > self._limit and self._entries:
            self._held -= _nbytes(self._entries.popitem(last=False)[1])
        levels = len(rows[0]) - 1
        return ImageFeatures(
            embeds=tuple(row[0] for row in rows),
            deepstack=tuple(tuple(row[level + 1] for row in rows) for level in range(levels)),
        )


def _nbytes(tensors: tuple[torch.Tensor, ...]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
