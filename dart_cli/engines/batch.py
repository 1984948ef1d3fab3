"""The requests that are decoded together, and the forward passes that do it.

    ActiveRequest   one request: waiting, or a row of the batch
    RunningBatch    prefills the rows that join, decodes one token for all, removes rows
    JoinPolicy      when waiting requests join a running batch

A request joins between two passes: the prompts of all requests that join together are one forward
pass of their own, which draws their first tokens; then their keys and values are added to the
batch's. Every row has its own length, position, temperature and random numbers.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from dart_cli.engines.base import GenerateRequest, Generation
from dart_cli.engines.completions import CompletionBuilder
from dart_cli.engines.features import FeatureCache
from dart_cli.engines.inverse_cdf import uniform_numbers
from dart_cli.engines.kv_cache import BatchKVCache, kv_bytes_per_token
from dart_cli.engines.sampling import sample
from dart_cli.policy.forward import ModelInputs, logits
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.model import LoadedPolicy

PREFILL_ITERATIONS = 2
"""Cost of a prefill for the rows that it delays, beside the prompts' own work, in iterations."""


@dataclass(eq=False)
class ActiveRequest:
    """One request, waiting or running."""

    request: GenerateRequest
    builder: CompletionBuilder
    images: list[PreparedImage]
    arrived: float
    began: float = 0.0  # start of its prefill
    position: int = 0  # of the last token drawn, in the model's position ids
    future: Future[Generation] = field(default_factory=Future)
    cancelled: bool = False  # no caller awaits it any more; its row can end early

    @property
    def token_ids(self) -> list[int]:
        """The prompt and what has been drawn so far."""
        return self.request.prompt_token_ids + self.builder.token_ids

    @property
    def most_tokens(self) -> int:
        """Tokens of prompt and completion, if it reaches max_tokens."""
        return len(self.request.prompt_token_ids) + self.request.sampling.max_tokens

    @cached_property
    def uniform(self) -> NDArray[np.float64]:
        """One number for each position of the completion."""
        sampling = self.request.sampling
        return uniform_numbers(sampling.seed, sampling.max_tokens)

    def finished(self, ends: Container[int]) -> Literal["end", "length"] | None:
        """Why the completion is over; None if it is not."""
        return self.builder.finished(ends, self.request.sampling.max_tokens)


@dataclass(frozen=True)
class Prefilled:
    """Requests after their prefill, before their keys and values are added to the batch's."""

    jobs: Sequence[ActiveRequest]
    cache: DynamicCache  # padded on the left
    lengths: list[int]  # [rows], tokens of each in the cache


class RunningBatch:
    """The rows that are decoded, in no particular order. Used by one thread.

    `cache_bytes` bounds their keys and values, with every row counted at the greatest length that any
    of them can reach; a single request is served whatever its size.
    """

    def __init__(self, policy: LoadedPolicy, features: FeatureCache, cache_bytes: int) -> None:
        self.jobs: list[ActiveRequest] = []
        self._policy = policy
        self._features = features
        self._cache = BatchKVCache()
        self._most_tokens = max(1, cache_bytes // kv_bytes_per_token(policy.model))

    def fitting(self, waiting: Iterable[ActiveRequest], slots: int) -> int:
        """How many of the waiting requests, from the first, fit into `slots` and the cache."""
        longest = max((job.most_tokens for job in self.jobs), default=0)
        rows = len(self.jobs)
        for job in islice(waiting, slots):
            longest = max(longest, job.most_tokens)
            if rows > 0 and (rows + 1) * longest > self._most_tokens:
                break
            rows += 1
        return rows - len(self.jobs)

    @torch.inference_mode()
    def prefill(self, jobs: Sequence[ActiveRequest], version: int) -> Prefilled:
        """One pass over the prompts of `jobs`, which draws a token for each under `version`.

        The rows of the batch are not touched.
        """
        policy = self._policy
        inputs = policy.inputs_of([job.token_ids for job in jobs], [job.images for job in jobs])
        lengths = [len(job.token_ids) for job in jobs]
        features = self._features.of(policy, inputs)
        cache = DynamicCache()
        values = logits(policy.model, inputs, last=1, features=features, cache=cache)[:, 0]
        for job, position in zip(jobs, inputs.next_position.tolist(), strict=True):
            job.position = position
        self._draw(jobs, values, version)
        return Prefilled(jobs, cache, lengths)

    @torch.inference_mode()
    def join(self, prefilled: Prefilled) -> None:
        """Add these to the batch: they are decoded from the next pass on."""
        self._cache.join(prefilled.cache, prefilled.lengths)
        self.jobs += prefilled.jobs

    @torch.inference_mode()
    def decode(self, version: int) -> None:
        """One iteration: a token for every row, under `version`."""
        last = torch.tensor([job.builder.token_ids[-1] for job in self.jobs])
        position = torch.tensor([job.position for job in self.jobs])
        inputs = ModelInputs(
            input_ids=last[:, None],
            attention_mask=self._cache.begin_pass(),
            position_ids=position[None, :, None].expand(3, -1, -1),
            next_position=position + 1,
            images=(),
            shown=(),
        )
        values = logits(self._policy.model, inputs, last=1, cache=self._cache)[:, 0]
        self._cache.end_pass()
        for job in self.jobs:
            job.position += 1
        self._draw(self.jobs, values, version)

    @torch.inference_mode()
    def leave(self, gone: Container[ActiveRequest]) -> None:
        """Remove these from the batch."""
        rows = {row for row, job in enumerate(self.jobs) if job in gone}
        if rows:
            self.jobs = [self.jobs[row] for row in self._cache.leave(rows)]

    def clear(self) -> None:
        """Remove all rows, whatever state the cache is in."""
        self._cache.clear()
        self.jobs = []

    def _draw(self, jobs: Sequence[ActiveRequest], values: torch.Tensor, version: int) -> None:
        drawn = sample(
            values,
            [float(job.uniform[len(job.builder)]) for job in jobs],
            [job.request.sampling.temperature for job in jobs],
            self._policy.forbidden(values.device),
        )
        for job, token, logprob, entropy in zip(
            jobs, drawn.token_ids, drawn.logprobs, drawn.entropies, strict=True
        ):
            job.builder.add(token, logprob, entropy, version)


class JoinPolicy:
    """When waiting requests join a running batch, rather than wait for more to join with them.

    A prefill delays all rows of the batch, and much of that delay is the same for one joiner as for
    ten. So joiners wait until the sum of the iterations they have waited equals the sum of the
    iterations that their prefill will cost the others: at most twice the loss of a policy that
    knows the future (Dooly, Goldman and Scott, "On-line analysis of the TCP acknowledgment delay problem", J. ACM
    48, 2001). Counted in iterations, not in seconds, so that the same requests make the same
    batches.
    """

    def __init__(self, prefill_iterations: float = PREFILL_ITERATIONS) -> None:
        self._cost = prefill_iterations
        self._waited = 0

    def admits(self, joiners: int, running: int) -> bool:
        """Whether `joiners` requests join `running` rows now; called once before each iteration."""
        if joiners and self._waited >= self._cost * running:
            self._waited = 0
            return True
        self._waited = self._waited + joiners if joiners else 0
        return False
