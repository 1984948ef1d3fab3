"""The requests that are decoded together, and the forward passes that do it.

    RunningBatch    prefills the rows that join, decodes one token for all, removes rows
    PromptTokens    tokens of prompts: asked for, computed, taken from the prefix cache

A request joins between two passes: the prompts of the requests that join together are a forward pass
of their own, which draws their first tokens; then their keys and values are added to the batch's. Every
row has its own length, position, temperature and random numbers.

A prefill computes what the prefix cache (dart_cli.engines.caches) does not have. Its rows end in
the same column, so each computes as many tokens as the row with most to compute, and rows that differ
much have passes of their own. Equal prompts that join together are computed once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from transformers import Cache, DynamicCache

from dart_cli.engines.caches import (
    BLOCK,
    BatchKVCache,
    CachedPrefix,
    CachedRow,
    FeatureCache,
    PrefixCache,
    kv_bytes_per_token,
)
from dart_cli.engines.pointer_sampling import PointerSampler
from dart_cli.engines.requests import ActiveRequest
from dart_cli.engines.sampling import sample
from dart_cli.policy.forward import ImageFeatures, ModelInputs, last_hidden, vocabulary_logits
from dart_cli.policy.loader import LoadedPolicy

SMALL_PREFILL = 256
"""Tokens of a row that a pass computes at hardly more cost than fewer."""


@dataclass
class PromptTokens:
    """Tokens of the prompts served so far, those of a partial included: asked = computed + cached."""

    asked: int = 0
    computed: int = 0
    cached: int = 0  # computed before, or with an equal prompt


@dataclass(frozen=True)
class Prefilled:
    """Requests after their prefill, before their keys and values are added to the batch's."""

    jobs: Sequence[ActiveRequest]
    cache: DynamicCache  # padded on the left
    lengths: list[int]  # [rows], tokens of each in the cache


@dataclass(frozen=True)
class _Prompt:
    """Requests of equal tokens and screens, which are one row of a prefill."""

    jobs: list[ActiveRequest]
    token_ids: list[int]
    blocks: list[int]  # of the prefix cache

    @property
    def new(self) -> int:
        """Tokens to compute, one at least."""
        return len(self.token_ids) - min(len(self.blocks) * BLOCK, len(self.token_ids) - 1)


class RunningBatch:
    """The rows that are decoded, in no particular order. Used by one thread.

    `cache_bytes` bounds their keys and values, with every row counted at the greatest length that any
    of them can reach; a single request is served whatever its size. `prefix_bytes` bounds those of
    requests served before.
    """

    def __init__(
        self, policy: LoadedPolicy, features: FeatureCache, cache_bytes: int, prefix_bytes: int
    ) -> None:
        self.jobs: list[ActiveRequest] = []
        self.tokens = PromptTokens()
        self._policy = policy
        self._features = features
        self._pointers = PointerSampler(policy, features)
        self._cache = BatchKVCache()
        self._most_tokens = max(1, cache_bytes // kv_bytes_per_token(policy.model))
        self._prefixes = PrefixCache(policy.model, prefix_bytes)
        self._weights = 0  # how often they have changed

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

    def swapped(self) -> None:
        """Note that the weights have changed.

        What was computed up to now serves no request that joins later.
        """
        self._weights += 1
        self._prefixes.clear()

    @torch.inference_mode()
    def prefill(self, jobs: Sequence[ActiveRequest], version: int) -> list[Prefilled]:
        """Compute the prompts of `jobs` and draw a token for each under `version`.

        The rows of the batch are not touched.
        """
        prompts = self._prompts(jobs)
        passes = [self._prefill(part, version) for part in _alike(prompts)]
        for each in passes:
            layer: Any = each.cache.layers[0]
            rows = list(enumerate(each.jobs))
            self._store(each.cache, rows, each.lengths, layer.keys.shape[2])
        return passes

    def _prompts(self, jobs: Sequence[ActiveRequest]) -> list[_Prompt]:
        """Return the distinct prompts of `jobs`, in their order."""
        found: dict[tuple[object, ...], _Prompt] = {}
        for job in jobs:
            job.weights = self._weights
            token_ids = job.token_ids
            key = (*token_ids, *(image.key for image in job.images))
            if key not in found:
                keys = job.block_keys(token_ids, self._policy.image_token_id)
                blocks = self._prefixes.match(keys)
                found[key] = _Prompt([], token_ids, blocks)
            found[key].jobs.append(job)
        return list(found.values())

    def _prefill(self, prompts: Sequence[_Prompt], version: int) -> Prefilled:
        """One pass over `prompts`, each from the token on that leaves as many as the one with most."""
        policy = self._policy
        firsts = [prompt.jobs[0] for prompt in prompts]
        lengths = [len(prompt.token_ids) for prompt in prompts]
        new, longest = max(prompt.new for prompt in prompts), max(lengths)
        inputs = policy.inputs_of(
            [prompt.token_ids for prompt in prompts], [job.images for job in firsts]
        )
        past = [
            CachedPrefix(prompt.blocks, max(0, length - new))
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        cache = self._prefixes.read(past, longest - new)
        inputs, features = self._rest(inputs, firsts, new)
        hidden = last_hidden(policy.model, inputs, last=1, features=features, cache=cache)[:, 0]
        rows = [row for row, prompt in enumerate(prompts) for _ in prompt.jobs]
        jobs = [job for prompt in prompts for job in prompt.jobs]
        if len(jobs) > len(prompts):
            hidden = hidden[rows]
            cache.batch_select_indices(torch.tensor(rows, device=hidden.device))
        positions = inputs.next_position.tolist()
        for row, job in zip(rows, jobs, strict=True):
            job.position = positions[row]
        self._draw(jobs, hidden, version)
        asked, computed = sum(lengths[row] for row in rows), sum(min(new, n) for n in lengths)
        self.tokens.asked += asked
        self.tokens.computed += computed
        self.tokens.cached += asked - computed
        return Prefilled(jobs, cache, [lengths[row] for row in rows])

    def _rest(
        self, inputs: ModelInputs, jobs: Sequence[ActiveRequest], new: int
    ) -> tuple[ModelInputs, ImageFeatures | None]:
        """Return the last `new` columns of `inputs`, and the features of the placeholders in them.

        The mask stays whole. Of a screen whose placeholders begin before these columns, features
        are given from the first placeholder in them on.
        """
        columns = inputs.input_ids.shape[1]
        if new == columns:
            return inputs, self._features.of(self._policy, inputs)
        shown: list[int] = []  # of inputs.images
        skipped: list[int] = []  # placeholders of each of these
        numbers = iter(inputs.shown)
        placeholders = inputs.input_ids == self._policy.image_token_id
        before = placeholders[:, :-new].sum(dim=1).tolist()
        for job, gone in zip(jobs, before, strict=True):
            for image in job.images:
                number = next(numbers)
                if gone < image.tokens:
                    shown.append(number)
                    skipped.append(gone)
                gone = max(0, gone - image.tokens)
        kept = sorted(set(shown))
        inputs = replace(
            inputs,
            input_ids=inputs.input_ids[:, -new:],
            position_ids=inputs.position_ids[:, :, -new:],
            images=tuple(inputs.images[number] for number in kept),
            shown=tuple(range(len(shown))),
        )
        features = self._features.of(self._policy, inputs)
        if features is None:
            return inputs, None
        parts = [(kept.index(number), first) for number, first in zip(shown, skipped, strict=True)]
        return inputs, ImageFeatures(
            embeds=tuple(features.embeds[number][first:] for number, first in parts),
            deepstack=tuple(
                tuple(level[number][first:] for number, first in parts)
                for level in features.deepstack
            ),
        )

    def _store(
        self,
        cache: Cache,
        rows: Sequence[tuple[int, ActiveRequest]],
        lengths: Sequence[int],
        end: int,
    ) -> None:
        """Keep some rows of `cache` as prefixes of later requests; all rows end before column `end`."""
        image_token = self._policy.image_token_id
        kept = [
            CachedRow(
                row,
                end - lengths[row],
                job.block_keys(job.token_ids[: lengths[row]], image_token),
            )
            for row, job in rows
            if job.weights == self._weights
        ]
        with contextlib.suppress(torch.OutOfMemoryError):  # the next such request computes it again
            self._prefixes.store(cache, kept)

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
        hidden = last_hidden(self._policy.model, inputs, last=1, cache=self._cache)[:, 0]
        self._cache.end_pass()
        for job in self.jobs:
            job.position += 1
        self._draw(self.jobs, hidden, version)

    @torch.inference_mode()
    def keep(self, jobs: Container[ActiveRequest]) -> None:
        """Let later requests begin like these, which have ended; not after a failure of their pass."""
        rows = [(row, job) for row, job in enumerate(self.jobs) if job in jobs]
        if rows:
            self._store(self._cache, rows, self._cache.lengths, self._cache.end)

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

    def _draw(self, jobs: Sequence[ActiveRequest], hidden: torch.Tensor, version: int) -> None:
        """Add a token to each of `jobs` [B], from the last hidden states [B, H]."""
        values = vocabulary_logits(self._policy.model, hidden)
        forced = self._pointers.sample_forced(jobs, hidden)
        drawn = sample(
            values,
            [job.next_uniform for job in jobs],
            [job.request.sampling.temperature for job in jobs],
            self._policy.forbidden(values.device),
        )
        for row, job in enumerate(jobs):
            job.builder.add(forced.get(row, drawn[row]), version)


def _alike(prompts: Iterable[_Prompt]) -> list[list[_Prompt]]:
    """`prompts` in parts, so that no pass computes more than twice the tokens that it must."""
    parts: list[list[_Prompt]] = []
    for prompt in sorted(prompts, key=lambda each: -each.new):
        if not parts or max(2 * prompt.new, SMALL_PREFILL) < parts[-1][0].new:
            parts.append([])
        parts[-1].append(prompt)
    return parts
