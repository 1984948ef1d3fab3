"""The requests that are decoded together, and the forward passes that do it.

    ActiveRequest        one request: waiting, or a row of the batch
    RunningBatch      prefill of joiners, one pass more for all, rows that leave
    Patience   when those who wait join a running batch

A request joins between two passes: the prompts of all that join at once are one forward pass of
their own, which draws their first tokens; then their keys and values stand beside the others'.
Every row has its own length, position, temperature and random numbers.
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
from dart_cli.engines.completions import Draft
from dart_cli.engines.features import FeatureCache
from dart_cli.engines.kv_cache import RowCache, token_bytes
from dart_cli.engines.sampling import draw, uniforms
from dart_cli.policy.forward import ModelInputs, logits
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.model import LoadedPolicy

PREFILL_ITERATIONS = 2
"""What a prefill costs those who wait for it, beside its prompts' own work, in iterations."""


@dataclass(eq=False)
class ActiveRequest:
    """One request, waiting or in work."""

    request: GenerateRequest
    draft: Draft
    images: list[PreparedImage]
    arrived: float
    began: float = 0.0  # of its prefill
    position: int = 0  # of the token drawn last, in the model's counting
    future: Future[Generation] = field(default_factory=Future)
    given_up: bool = False  # nobody awaits it any more; its row may end early

    @property
    def token_ids(self) -> list[int]:
        """The prompt and what has been drawn so far."""
        return self.request.prompt_token_ids + self.draft.token_ids

    @property
    def most_tokens(self) -> int:
        """Prompt and completion together, if it goes on to its length."""
        return len(self.request.prompt_token_ids) + self.request.sampling.max_tokens

    @cached_property
    def uniform(self) -> NDArray[np.float64]:
        """One number for each place of the completion."""
        return uniforms(self.request.sampling)

    def stop(self, ends: Container[int]) -> Literal["end", "length"] | None:
        """Why the completion is over; None if it is not."""
        tokens = self.draft.token_ids
        if tokens and tokens[-1] in ends:
            return "end"
        return "length" if len(tokens) >= self.request.sampling.max_tokens else None


@dataclass(frozen=True)
class Prefilled:
    """Jobs whose first tokens are drawn and whose keys and values are still their own."""

    jobs: Sequence[ActiveRequest]
    cache: DynamicCache  # padded on the left
    lengths: list[int]  # tokens of each that it holds


class RunningBatch:
    """Rows in decoding, in no particular order. Used by one thread alone.

    `cache_bytes` bounds their keys and values, all rows counted at the greatest length that any of
    them may reach; a single request is served whatever it takes.
    """

    def __init__(self, policy: LoadedPolicy, features: FeatureCache, cache_bytes: int) -> None:
        self.jobs: list[ActiveRequest] = []
        self._policy = policy
        self._features = features
        self._cache = RowCache()
        self._most_tokens = max(1, cache_bytes // token_bytes(policy.model))

    def fitting(self, waiting: Iterable[ActiveRequest], places: int) -> int:
        """How many of those who wait, the first ones, `places` and the cache have room for."""
        longest = max((job.most_tokens for job in self.jobs), default=0)
        rows = len(self.jobs)
        for job in islice(waiting, places):
            longest = max(longest, job.most_tokens)
            if rows > 0 and (rows + 1) * longest > self._most_tokens:
                break
            rows += 1
        return rows - len(self.jobs)

    @torch.inference_mode()
    def prefill(self, jobs: Sequence[ActiveRequest], version: int) -> Prefilled:
        """One pass over the prompts of `jobs`, which draws a token of each under `version`.

        The rows in decoding are not touched.
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
        """From now on these are decoded with the others."""
        self._cache.join(prefilled.cache, prefilled.lengths)
        self.jobs += prefilled.jobs

    @torch.inference_mode()
    def decode(self, version: int) -> None:
        """One iteration: a token for every row, under `version`."""
        last = torch.tensor([job.draft.token_ids[-1] for job in self.jobs])
        position = torch.tensor([job.position for job in self.jobs])
        inputs = ModelInputs(
            input_ids=last[:, None],
            attention_mask=self._cache.begin(),
            position_ids=position[None, :, None].expand(3, -1, -1),
            next_position=position + 1,
            images=(),
            shown=(),
        )
        values = logits(self._policy.model, inputs, last=1, cache=self._cache)[:, 0]
        self._cache.done()
        for job in self.jobs:
            job.position += 1
        self._draw(self.jobs, values, version)

    @torch.inference_mode()
    def leave(self, gone: Container[ActiveRequest]) -> None:
        """These are in work no longer: their rows are free."""
        rows = {row for row, job in enumerate(self.jobs) if job in gone}
        if rows:
            self.jobs = [self.jobs[row] for row in self._cache.leave(rows)]

    def clear(self) -> None:
        """Nothing is in work, whatever state the cache is in."""
        self._cache.clear()
        self.jobs = []

    def _draw(self, jobs: Sequence[ActiveRequest], values: torch.Tensor, version: int) -> None:
        drawn = draw(
            values,
            [float(job.uniform[len(job.draft)]) for job in jobs],
            [job.request.sampling.temperature for job in jobs],
            self._policy.forbidden(values.device),
        )
        for job, token, logprob, entropy in zip(
            jobs, drawn.token_ids, drawn.logprobs, drawn.entropies, strict=True
        ):
            job.draft.add(token, logprob, entropy, version)


class Patience:
    """When those who wait join a running batch, rather than wait for companions.

    A prefill holds up all rows in decoding, and much of that is the same for one joiner as for
    ten. So joiners wait until the iterations they have waited, added up, are what their prefill
    will cost the others, added up: at most twice what one who knew the future would lose
    (Dooly, Goldman and Scott, "On-line analysis of the TCP acknowledgment delay problem", J. ACM
    48, 2001). Counted in iterations, not in seconds, so that the same requests make the same
    batches.
    """

    def __init__(self, prefill_iterations: float = PREFILL_ITERATIONS) -> None:
        self._cost = prefill_iterations
        self._waited = 0

    def admits(self, joiners: int, running: int) -> bool:
        """Whether so many join so many now; asked once before each iteration."""
        if joiners and self._waited >= self._cost * running:
            self._waited = 0
            return True
        self._waited = self._waited + joiners if joiners else 0
        return False
