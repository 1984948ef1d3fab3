"""The requests that are decoded together, and the forward passes that decode them.

    RunningBatch    prefills the rows that join, decodes one token for all rows, removes rows
    PromptTokens    counts tokens of prompts: all, those computed, those taken from the prefix cache

Requests join between two passes. The prompts of all requests that join together run in a separate forward
pass, which draws their first tokens. Then their keys and values are added to those of the batch. Every row
has its own length, position, temperature and random numbers.

A prefill computes the tokens that the prefix cache (dart_cli.engines.caches) does not have. All rows of a
prefill end in the same column, so each computes as many tokens as the row with the most to compute; rows that
differ much run in separate passes. Equal prompts that join together are computed once.

Recurrent layers can begin only where a snapshot of their states was taken (dart_cli.engines.states). So with
such layers each row computes exactly the tokens after its snapshot, with padding between the earlier tokens
and these:

    column      0  1  2  3  4  5  6  7
    row 0       a  b  c  d  |  e  f  g  h      4 earlier tokens, 4 new ones
    row 1       .  .  p  q  |  .  .  .  r      2 earlier tokens, 1 new one

The padding is taken out before the rows join the batch. While a row is decoded, it has a snapshot at its last
whole block, which moves along with it. So the next step of a trajectory does not compute the completion again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from transformers import Cache

from dart_cli.engines.caches import (
    BLOCK,
    BatchKVCache,
    CachedPrefix,
    CachedRow,
    FeatureCache,
    PrefixCache,
    kv_bytes_per_token,
    state_bytes_per_row,
)
from dart_cli.engines.pointer_sampling import PointerSampler
from dart_cli.engines.requests import ActiveRequest
from dart_cli.engines.sampling import sample
from dart_cli.policy.delta_net import LayerStates, StateCache
from dart_cli.policy.experts import Recording, RoutingShape
from dart_cli.policy.forward import ImageFeatures, ModelInputs, last_hidden, vocabulary_logits
from dart_cli.policy.loader import LoadedPolicy

SMALL_PREFILL = 256
"""Tokens of a row up to which a pass costs hardly more than with fewer."""
SHORT_PARTING = 64
"""Tokens that are not worth a snapshot where prompts part; it has the bytes of about 2,000 tokens' keys and
values."""


@dataclass
class PromptTokens:
    """The tokens of the prompts served so far, partials included: total = computed + cached."""

    total: int = 0
    computed: int = 0
    cached: int = 0  # computed for an earlier request, or once for equal prompts


@dataclass(frozen=True)
class Prefilled:
    """Requests after their prefill, before their keys and values are added to those of the batch."""

    jobs: Sequence[ActiveRequest]
    cache: Cache  # padded on the left
    lengths: list[int]  # [rows], tokens of each in the cache


@dataclass(frozen=True)
class _Snapshots:
    """The snapshots that a prefill leaves."""

    keys: list[bytes]  # [S]
    states: list[LayerStates]  # of each recurrent layer, S sequences


@dataclass(frozen=True)
class _Prompt:
    """Requests with equal tokens and screens, which share one row of a prefill."""

    jobs: list[ActiveRequest]
    token_ids: list[int]
    keys: Sequence[bytes]  # of the blocks of its tokens
    blocks: list[int]  # of the prefix cache, from the first token on
    start: int  # the first token to compute

    @property
    def new(self) -> int:
        """The number of tokens to compute, at least one."""
        return len(self.token_ids) - self.start

    def key(self, end: int) -> bytes | None:
        """Return the key of the block that ends before token `end`; None for the first token."""
        return self.keys[end // BLOCK - 1] if end else None

    def cuts(self) -> list[int]:
        """Return the tokens before which snapshots of recurrent states are taken.

        These are the end of the prompt, and the token where it parts from an earlier one.
        """
        end = (len(self.token_ids) - 1) // BLOCK * BLOCK
        parting = min(len(self.blocks) * BLOCK, end)
        cuts = [parting] if parting >= self.start + SHORT_PARTING else []
        return sorted({*cuts, end} - {self.start, 0})


class RunningBatch:
    """The rows that are decoded, in no particular order. For one thread.

    `cache_bytes` bounds the keys, values and states of the rows, where every row counts with the greatest length
    that any of them can reach; a single request is served whatever its size. `prefix_bytes` bounds those of
    earlier requests. With `routing`, the experts that a mixture chooses are recorded for each token.
    """

    def __init__(
        self,
        policy: LoadedPolicy,
        features: FeatureCache,
        cache_bytes: int,
        prefix_bytes: int,
        *,
        routing: RoutingShape | None = None,
    ) -> None:
        self.jobs: list[ActiveRequest] = []
        self.tokens = PromptTokens()
        self._policy = policy
        self._features = features
        self._pointers = PointerSampler(policy, features)
        self._cache = BatchKVCache()
        self._cache_bytes = cache_bytes
        self._token_bytes = kv_bytes_per_token(policy.model)
        self._row_bytes = state_bytes_per_row(policy.model)
        self._routing = routing
        routing_bytes = routing.nbytes if routing else 0
        self._prefixes = PrefixCache(policy.model, prefix_bytes, routing_bytes)
        self._weights = 0  # counts changes of the weights

    def count_fitting(self, waiting: Iterable[ActiveRequest], slots: int) -> int:
        """Return how many of the waiting requests, from the first on, fit into `slots` and the cache."""
        longest = max((job.most_tokens for job in self.jobs), default=0)
        rows = len(self.jobs)
        for job in islice(waiting, slots):
            longest = max(longest, job.most_tokens)
            row_bytes = longest * self._token_bytes + self._row_bytes
            if rows > 0 and (rows + 1) * row_bytes > self._cache_bytes:
                break
            rows += 1
        return rows - len(self.jobs)

    def drop_prefixes(self) -> None:
        """Drop the prefix cache after a change of weights; rows of the batch keep their keys and values."""
        self._weights += 1
        self._prefixes.clear()

    @torch.inference_mode()
    def prefill(self, jobs: Sequence[ActiveRequest], version: int) -> list[Prefilled]:
        """Compute the prompts of `jobs` and draw a token of `version` for each; the batch stays as it is."""
        prompts = self._prompts(jobs)
        passes = [self._prefill(part, version) for part in _alike(prompts)]
        # Nothing is stored before, because that may overwrite what a later pass reads.
        for prefilled, snapshots in passes:
            rows = list(enumerate(prefilled.jobs))
            self._store(prefilled.cache, rows, prefilled.lengths, end=max(prefilled.lengths))
            if snapshots is not None and self._prefixes.snapshots is not None:
                with contextlib.suppress(torch.OutOfMemoryError):
                    self._prefixes.snapshots.store(snapshots.keys, snapshots.states)
        return [prefilled for prefilled, _ in passes]

    def _prompts(self, jobs: Sequence[ActiveRequest]) -> list[_Prompt]:
        """Return the distinct prompts of `jobs`, in order."""
        prompts: dict[tuple[object, ...], _Prompt] = {}
        for job in jobs:
            job.weights = self._weights
            token_ids = job.token_ids
            key = (*token_ids, *(image.key for image in job.images))
            if key not in prompts:
                keys = job.block_keys(token_ids, self._policy.image_token_id)
                blocks, start = self._prefixes.match(keys), len(token_ids) - 1
                if self._prefixes.snapshots is not None:
                    usable = keys[: min(len(blocks), start // BLOCK)]
                    start = self._prefixes.snapshots.longest(usable) * BLOCK
                start = min(start, len(blocks) * BLOCK)
                prompts[key] = _Prompt([], token_ids, keys, blocks, start)
            prompts[key].jobs.append(job)
        return list(prompts.values())

    def _prefill(
        self, prompts: Sequence[_Prompt], version: int
    ) -> tuple[Prefilled, _Snapshots | None]:
        """Run one pass over `prompts`, and return also the snapshots to take of recurrent layers."""
        # 1. Read the tokens before these from the prefix cache, and compute the rest.
        policy, snapshots = self._policy, self._prefixes.snapshots
        firsts = [prompt.jobs[0] for prompt in prompts]
        lengths = [len(prompt.token_ids) for prompt in prompts]
        new = max(prompt.new for prompt in prompts)
        if snapshots is None:  # each row computes as many tokens as the one with the most
            starts = [max(0, length - new) for length in lengths]
            cuts: list[list[int]] = [[] for _ in prompts]
        else:
            starts = [prompt.start for prompt in prompts]
            cuts = [prompt.cuts() if snapshots.capacity else [] for prompt in prompts]
        past = [
            CachedPrefix(prompt.blocks, start, None if snapshots is None else prompt.key(start))
            for prompt, start in zip(prompts, starts, strict=True)
        ]
        cache = self._prefixes.read(past, max(starts))
        inputs = policy.inputs_of(
            [prompt.token_ids for prompt in prompts], [job.images for job in firsts]
        )
        inputs, features = self._rest(inputs, firsts, new)
        mask = _mask(starts, lengths)
        recording = self._recording()
        hidden = last_hidden(
            policy.model,
            replace(inputs, attention_mask=mask),
            last=1,
            features=features,
            cache=cache,
            routing=recording,
            cuts=[  # in columns of this pass
                [cut + new - length for cut in row_cuts]
                for row_cuts, length in zip(cuts, lengths, strict=True)
            ],
        )[:, 0]
        to_store = None
        if snapshots is not None:
            to_store = self._take_snapshots(prompts, cuts, cache)
            _take_out_padding(cache, mask)
        if recording is not None:
            self._record_prompts(prompts, starts, recording)
        # 2. Copy the row of a prompt that several requests share, and draw a token for each request.
        rows = [row for row, prompt in enumerate(prompts) for _ in prompt.jobs]
        jobs = [job for prompt in prompts for job in prompt.jobs]
        if len(jobs) > len(prompts):
            hidden = hidden[rows]
            cache.batch_select_indices(torch.tensor(rows, device=hidden.device))
        positions = inputs.next_position.tolist()
        for row, job in zip(rows, jobs, strict=True):
            job.position = positions[row]
        self._draw(jobs, hidden, version)
        # 3. Count.
        total = sum(lengths[row] for row in rows)
        computed = sum(lengths) - sum(starts)
        self.tokens.total += total
        self.tokens.computed += computed
        self.tokens.cached += total - computed
        return Prefilled(jobs, cache, [lengths[row] for row in rows]), to_store

    def _recording(self) -> Recording | None:
        """Return what the routers of a pass record in; None if the choice of experts is not recorded."""
        return None if self._routing is None else Recording(self._routing)

    def _record_prompts(
        self, prompts: Sequence[_Prompt], starts: Sequence[int], recording: Recording
    ) -> None:
        """Note the experts of all tokens of `prompts`, of which the cache had those before `starts`."""
        computed = recording.choices(len(prompts))
        for prompt, start, row in zip(prompts, starts, computed, strict=True):
            new = row[len(row) - (len(prompt.token_ids) - start) :].tobytes()
            before = self._prefixes.routing_of(prompt.blocks, start)
            for job in prompt.jobs:
                job.routing = bytearray(before + new)

    def _take_snapshots(
        self, prompts: Sequence[_Prompt], cuts: Sequence[Sequence[int]], cache: Cache
    ) -> _Snapshots:
        """Take the recurrent states at the `cuts` of `prompts` out of `cache`, and leave those at the ends.

        Each row has left the states of all its nodes, one after another: one at each cut, and one at the end.
        """
        snapshots = self._prefixes.snapshots
        assert snapshots is not None
        keys: list[bytes] = []
        nodes: list[int] = []
        ends: list[int] = []
        first = 0
        for prompt, row_cuts in zip(prompts, cuts, strict=True):
            keys += [prompt.keys[cut // BLOCK - 1] for cut in row_cuts]
            ends.append(first + len(row_cuts))
            nodes += range(first, ends[-1])
            first = ends[-1] + 1
        result = _Snapshots(keys, snapshots.select(cache, nodes) if keys else [])
        for layer in cache.layers:
            if keys and isinstance(layer, StateCache):
                layer.batch_select_indices(torch.tensor(ends).to(layer.device))
        return result

    def _rest(
        self, inputs: ModelInputs, jobs: Sequence[ActiveRequest], new: int
    ) -> tuple[ModelInputs, ImageFeatures | None]:
        """Return the last `new` columns of `inputs`, and the features of the placeholders in these columns.

        The mask stays whole. If the placeholders of a screen begin before these columns, its features begin
        with the first placeholder in them.
        """
        columns = inputs.input_ids.shape[1]
        if new == columns:
            return inputs, self._features.of(self._policy, inputs)
        # 1. Find the images that have placeholders in these columns, and how many lie before them.
        image_order: list[int] = []  # index into inputs.images
        skipped: list[int] = []  # placeholders before these columns, of each image in image_order
        indices = iter(inputs.image_order)
        placeholders = inputs.input_ids == self._policy.image_token_id
        counts = placeholders[:, :-new].sum(dim=1).tolist()
        for job, before in zip(jobs, counts, strict=True):
            for image in job.images:
                index = next(indices)
                if before < image.tokens:
                    image_order.append(index)
                    skipped.append(before)
                before = max(0, before - image.tokens)
        # 2. Leave the other images out.
        remaining = sorted(set(image_order))
        inputs = replace(
            inputs,
            input_ids=inputs.input_ids[:, -new:],
            position_ids=inputs.position_ids[:, :, -new:],
            images=tuple(inputs.images[index] for index in remaining),
            image_order=tuple(range(len(image_order))),
        )
        features = self._features.of(self._policy, inputs)
        if features is None:
            return inputs, None
        # 3. Cut the features off each image that lie before these columns.
        parts = [
            (remaining.index(index), first)
            for index, first in zip(image_order, skipped, strict=True)
        ]
        return inputs, ImageFeatures(
            embeds=tuple(features.embeds[place][first:] for place, first in parts),
            deepstack=tuple(
                tuple(level[place][first:] for place, first in parts)
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
        """Store some rows of `cache` as prefixes for later requests; all rows end before column `end`."""
        image_token = self._policy.image_token_id
        cached_rows = [
            CachedRow(
                row,
                end - lengths[row],
                job.block_keys(job.token_ids[: lengths[row]], image_token),
                bytes(job.routing),
            )
            for row, job in rows
            if job.weights == self._weights
        ]
        # Without the memory, a later request computes these tokens again.
        with contextlib.suppress(torch.OutOfMemoryError):
            self._prefixes.store(cache, cached_rows)

    @torch.inference_mode()
    def join(self, prefilled: Prefilled) -> None:
        """Add prefilled requests to the batch; they are decoded from the next pass on."""
        self._cache.join(prefilled.cache, prefilled.lengths)
        self.jobs += prefilled.jobs

    @torch.inference_mode()
    def decode(self, version: int) -> None:
        """Draw one token of `version` for every row."""
        last = torch.tensor([job.builder.token_ids[-1] for job in self.jobs])
        position = torch.tensor([job.position for job in self.jobs])
        inputs = ModelInputs(
            input_ids=last[:, None],
            attention_mask=self._cache.begin_pass(),
            position_ids=position[None, :, None].expand(3, -1, -1),
            next_position=position + 1,
            images=(),
            image_order=(),
        )
        recording = self._recording()
        hidden = last_hidden(
            self._policy.model, inputs, last=1, cache=self._cache, routing=recording
        )[:, 0]
        self._cache.end_pass()
        if recording is not None:
            for job, row in zip(self.jobs, recording.choices(len(self.jobs)), strict=True):
                job.routing += row.tobytes()
        self._move_snapshots()
        for job in self.jobs:
            job.position += 1
        self._draw(self.jobs, hidden, version)

    def _move_snapshots(self) -> None:
        """Take a snapshot of each row that is at the end of a block, in place of the one at the block before.

        Snapshots within the prompts stay, because other requests may have them in common.
        """
        snapshots = self._prefixes.snapshots
        if snapshots is None or not snapshots.capacity:
            return
        rows: list[int] = []
        keys: list[bytes] = []
        former: list[bytes] = []
        for row, (job, length) in enumerate(zip(self.jobs, self._cache.lengths, strict=True)):
            if length % BLOCK or job.weights != self._weights:
                continue
            of_row = job.block_keys(job.token_ids[:length], self._policy.image_token_id)
            rows.append(row)
            keys.append(of_row[-1])
            if length - BLOCK > len(job.request.prompt_token_ids):
                former.append(of_row[-2])
        with contextlib.suppress(torch.OutOfMemoryError):
            if rows:
                snapshots.store(keys, snapshots.select(self._cache, rows), former)

    @torch.inference_mode()
    def store_prefixes(self, jobs: Container[ActiveRequest]) -> None:
        """Store the keys and values of ended requests, so that later requests can begin from them.

        Do not call this after their pass has failed.
        """
        rows = [(row, job) for row, job in enumerate(self.jobs) if job in jobs]
        if rows:
            self._store(self._cache, rows, self._cache.lengths, self._cache.end)

    @torch.inference_mode()
    def remove(self, jobs: Container[ActiveRequest]) -> None:
        """Remove requests from the batch."""
        rows = {row for row, job in enumerate(self.jobs) if job in jobs}
        if rows:
            self.jobs = [self.jobs[row] for row in self._cache.remove(rows)]

    def clear(self) -> None:
        """Remove all rows; allowed in any state of the cache."""
        self._cache.clear()
        self.jobs = []

    def _draw(self, jobs: Sequence[ActiveRequest], hidden: torch.Tensor, version: int) -> None:
        """Draw a token for each of `jobs` [B] from the last hidden states [B, H], and append it.

        No other logits are computed. In float32 they take B times the vocabulary times 4 bytes, 61 MiB for 64
        rows of 248,320, and drawing at most 192 MiB more (dart_cli.engines.sampling).
        """
        values = vocabulary_logits(self._policy.model, hidden)
        forced = self._pointers.sample_forced(jobs, hidden)
        tokens = sample(
            values,
            [job.next_uniform for job in jobs],
            [job.request.sampling.temperature for job in jobs],
            self._policy.forbidden(values.device),
        )
        for row, job in enumerate(jobs):
            job.builder.add(forced.get(row, tokens[row]), version)


def _mask(earlier: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Return the mask [rows, columns] of rows of `lengths` tokens, of which a cache has the `earlier` ones."""
    new = [length - before for before, length in zip(earlier, lengths, strict=True)]
    mask = torch.zeros((len(new), max(earlier) + max(new)), dtype=torch.long)
    for row, (before, after) in enumerate(zip(earlier, new, strict=True)):
        mask[row, max(earlier) - before : max(earlier)] = 1
        mask[row, mask.shape[1] - after :] = 1
    return mask


def _take_out_padding(cache: Cache, mask: torch.Tensor) -> None:
    """Move the tokens of each row in `cache` to the right, over the padding between them.

    `mask` [rows, columns] is 1 on tokens. Columns in which no row has a token are dropped.
    """
    counts = mask.sum(1)
    longest = int(counts.max())
    columns = torch.arange(mask.shape[1])
    if torch.equal(mask, (columns >= mask.shape[1] - counts[:, None]).long()):
        return  # no row has padding between its tokens
    order = mask.argsort(dim=1, stable=True)[:, -longest:]  # padding first
    for layer in cache.layers:
        if isinstance(layer, StateCache):
            continue
        index = order.to(layer.keys.device)[:, None, :, None]
        for name in ("keys", "values"):
            old = getattr(layer, name)
            moved = old.gather(2, index.expand(-1, old.shape[1], -1, old.shape[3]))
            setattr(layer, name, moved)


def _alike(prompts: Iterable[_Prompt]) -> list[list[_Prompt]]:
    """Return `prompts` in parts of similar length, so that no pass computes over twice the needed tokens."""
    parts: list[list[_Prompt]] = []
    for prompt in sorted(prompts, key=lambda prompt: -prompt.new):
        if not parts or max(2 * prompt.new, SMALL_PREFILL) < parts[-1][0].new:
            parts.append([])
        parts[-1].append(prompt)
    return parts
