"""Checks on each batch that engine and trainer compute the same distribution.

    ComparedTokens       tokens with both log-probabilities, their version, the screens of their prompt
    compare              those of a pack that has just been scored
    step_mismatches      how far the two differ in each step, for the viewer; sent with BatchTrained
    LogprobCheck           metrics, which weights are kept for comparison, when the run must stop
    describe, alarm_of   metrics and an explanation; `dart doctor --parity` reports the same

Only tokens that one version alone sampled can be compared, and only with that version's weights:

- Tokens of the present weights are scored by the update's first pass anyway.
- With a trainer that is always ahead of its batches there are none. Then, every `parity_every`
  versions, the gate keeps a copy of the weights until their samples arrive, and scores a few of them
  with the copy in place of the present weights.

All others are stale: their difference is how far the policy has moved, and stops nothing.

Prompts are distinguished by their screens, because errors with images show in one kind: text alone,
one screen, or several, where positions and the order of images matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from math import isfinite

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from bus.messages import Batch, Sample, StepMismatch
from bus.ranks import PackedBatch
from dart_cli.algo.logprob_gap import Mismatch, mismatch
from dart_cli.config.schema import TrainConfig
from dart_cli.train.packs.batch_check import check_batch
from dart_cli.train.packs.pack import Pack, PackFeed
from dart_cli.train.packs.rank_shares import packed_batches
from dart_cli.train.sharded import local_shard
from dart_cli.train.trained_policy import TrainModel

LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Nats. Rounding alone makes a mean of about 1e-6 in float32 and of 0.01 to 0.03 in bfloat16, where
engine and trainer add in another order; other weights or another temperature make more than that."""

LEAST_TOKENS = 32
"""Of fewer tokens the mean is not meaningful: one unlikely token may differ much in bfloat16."""

RESCORED = 64
"""Samples that are scored with kept weights."""

STALEST = 16
"""Versions after which samples of kept weights are no longer waited for."""

SEEN = ("text", "one", "several")
"""How many screens a prompt shows: none, one, more."""


@dataclass(frozen=True)
class ComparedTokens:
    """Tokens [N] that an engine sampled; log-probabilities in nats."""

    engine: NDArray[np.float64]
    trainer: NDArray[np.float64]
    versions: NDArray[np.int64]  # whose weights sampled it; -1 where no single one did
    seen: NDArray[np.int64]  # index into SEEN
    places: NDArray[np.int64]  # index of its completion in `steps`
    indices: NDArray[np.int64]  # of the token in its completion
    steps: tuple[str, ...] = field(kw_only=True)
    """Completions: trajectory, step and rollout worker, in words."""

    @classmethod
    def of(
        cls,
        engine: ArrayLike,
        trainer: ArrayLike,
        versions: ArrayLike,
        seen: ArrayLike,
        places: ArrayLike,
        indices: ArrayLike,
        steps: Sequence[str],
    ) -> ComparedTokens:
        """Of any numbers [N]."""
        return cls(
            np.asarray(engine, dtype=np.float64),
            np.asarray(trainer, dtype=np.float64),
            *(np.asarray(each, dtype=np.int64) for each in (versions, seen, places, indices)),
            steps=tuple(steps),
        )

    def only(self, chosen: NDArray[np.bool_]) -> ComparedTokens:
        """Those of the tokens."""
        *columns, steps = vars(self).values()
        return ComparedTokens(*(column[chosen] for column in columns), steps=steps)

    def mismatch(self) -> Mismatch:
        """How far apart they are."""
        return mismatch(self.engine, self.trainer)

    def first_beyond(self, limit: float) -> str:
        """Where, in words: the first token beyond `limit` nats in the completion with the largest gap; empty if none is."""
        gaps = np.abs(self.engine - self.trainer)
        beyond = ~(gaps <= limit)  # not a number, too
        if not beyond.any():
            return ""
        worst = self.places[np.where(np.isnan(gaps), np.inf, gaps).argmax()]
        at = np.flatnonzero(beyond & (self.places == worst))[0]
        return (
            f"token {self.indices[at]} of {self.steps[worst]}, v{self.versions[at]}: "
            f"{self.engine[at]:.3f} there, {self.trainer[at]:.3f} here"
        )

    def by_seen(self) -> dict[str, Mismatch]:
        """Return how far apart they are by what the prompts showed, for each kind that there is."""
        kinds = {name: self.only(self.seen == index) for index, name in enumerate(SEEN)}
        return {name: part.mismatch() for name, part in kinds.items() if part.engine.size}


def compare(logprobs: torch.Tensor, pack: Pack) -> ComparedTokens:
    """Return the sampled tokens of a pack, scored `logprobs` [N].

    Left out are demonstrations, which no engine sampled, and what a pointer forces.
    """
    lengths = np.array(pack.lengths, dtype=np.int64)  # none where a rank has no work
    begins = np.repeat(lengths.cumsum() - lengths, lengths)
    seen = np.array([min(sample.images, len(SEEN) - 1) for sample in pack.samples], dtype=np.int64)
    whole = ComparedTokens(
        pack.behaviour_logprobs.numpy(),
        logprobs.detach().double().cpu().numpy(),
        pack.versions.numpy(),
        np.repeat(seen, lengths),
        np.repeat(np.arange(len(lengths)), lengths),
        np.arange(len(begins)) - begins,
        steps=tuple(_in_words(sample) for sample in pack.samples),
    )
    return whole.only((pack.drawn & ~pack.unknown).numpy())


def _in_words(sample: Sample) -> str:
    by = f", sampled by {sample.worker}" if sample.worker else ""
    return f"step {sample.step} of {sample.trajectory_id}{by}"


def step_mismatches(proximal: torch.Tensor, pack: Pack) -> list[StepMismatch]:
    """Of the samples of `pack`, whose tokens' log-probabilities before the update are `proximal` [N].

    Over the tokens that were drawn. A gap that is not finite is left out: the update says what is wrong there.
    """
    count = len(pack.samples)
    drawn = pack.drawn.numpy()
    gaps = (proximal.double().cpu() - pack.behaviour_logprobs).numpy()[drawn]
    of = np.repeat(np.arange(count), pack.lengths)[drawn]  # whose token each is
    largest = np.zeros(count)
    np.maximum.at(largest, of, np.abs(gaps))
    with np.errstate(invalid="ignore"):  # a sample without such a token has no mean
        means = np.bincount(of, weights=gaps, minlength=count) / np.bincount(of, minlength=count)
    return [
        StepMismatch(trajectory_id=sample.trajectory_id, step=sample.step, mean=mean, largest=most)
        for sample, mean, most in zip(pack.samples, means.tolist(), largest.tolist(), strict=True)
        if sample.behaviour_logprobs and isfinite(mean)
    ]


def all_of(parts: Sequence[ComparedTokens]) -> ComparedTokens:
    """All of their tokens."""
    if not parts:
        return ComparedTokens.of([], [], [], [], [], [], ())
    before = np.cumsum([0, *(len(part.steps) for part in parts)])
    parts = [
        replace(part, places=part.places + at) for part, at in zip(parts, before, strict=False)
    ]
    *columns, steps = zip(*(vars(part).values() for part in parts), strict=True)
    return ComparedTokens(*map(np.concatenate, columns), steps=tuple(chain.from_iterable(steps)))


def rescore(model: TrainModel, batch: Batch, pack_tokens: int) -> ComparedTokens:
    """Return the trainer's forward pass over a batch. Raises as `check` does (packs/rank_shares.py)."""
    check_batch(batch, model.policy)
    [part] = packed_batches(batch, model.policy, pack_tokens=pack_tokens)
    return rescore_part(model, part)


@torch.no_grad()
def rescore_part(model: TrainModel, part: PackedBatch) -> ComparedTokens:
    """Return the trainer's forward pass over a rank's part of a batch."""
    weights = [1.0] * len(part.batch.samples)
    with PackFeed(part, weights, model.policy) as packs:
        found = [
            compare(model.score(pack, part.batch.temperature).logprobs, pack) for pack in packs
        ]
    model.reshard()
    return all_of(found)


class LogprobCheck:
    """Compares batch by batch. Not thread-safe: the learner's thread."""

    def __init__(self, config: TrainConfig, model: TrainModel) -> None:
        self._config = config
        self._model = model
        self._limit = limit_of(model)
        self._due = -1  # the first version that is to be compared with
        self._kept: _Kept | None = None

    def to_look_back(self, batch: Batch, version: int | None) -> tuple[Batch, int | None]:
        """Return the batch with samples alone that one version sampled whose weights are not the present ones.

        A few of them; and that version. None where there are none. `version` is the present one, if any.
        """
        # The kept weights are the present ones where an update that was skipped left them.
        wanted = None if self._kept is None or self._kept.version == version else self._kept.version
        theirs = [
            sample
            for sample in batch.samples
            if sample.weight != 0
            and sample.behaviour_logprobs
            and any(s.start == 0 and s.version == wanted for s in sample.version_spans)
        ]
        found = batch.model_copy(update={"samples": theirs[:RESCORED]})
        return found, wanted if theirs else None

    def look_back(self, part: PackedBatch, version: int | None) -> ComparedTokens:
        """Return the tokens of a rank's part of `to_look_back`, scored with the weights of `version`."""
        if version is None or not part.packs:
            return all_of([])
        assert self._kept is not None  # to_look_back asked for its version; ranks keep alike
        with _in_place(self._model, self._kept.tensors):
            scored = rescore_part(self._model, part)
        return scored.only(scored.versions == version)

    def report(
        self, tokens: ComparedTokens, looked_back: ComparedTokens, version: int | None
    ) -> tuple[dict[str, float], str]:
        """(metrics, why the run must stop; empty if it need not) of a batch.

        `tokens` are all of it, scored with the present weights, which are `version`'s if they have
        been published.
        """
        fresh = tokens.versions == (-2 if version is None else version)
        same = all_of([tokens.only(fresh), looked_back])
        metrics = describe("parity", same) | describe("stale", tokens.only(~fresh))
        if not self._config.parity_every or same.engine.size < LEAST_TOKENS:
            return metrics, ""
        newest = int(same.versions.max())
        self._due = max(self._due, newest + self._config.parity_every)
        if self._kept is not None and self._kept.version <= newest:
            self._kept = None
        return metrics, alarm_of(same, self._limit)

    def keep(self, version: int | None) -> None:
        """Copy the present weights, which are about to change, where they are still to be compared."""
        if version is None or not self._is_due(version):
            return
        if self._kept is None or version - self._kept.version > STALEST:
            copies = {
                name: local_shard(value.detach()).to("cpu", copy=True)
                for name, value in self._model.trainable().items()
            }
            self._kept = _Kept(version, copies)

    def _is_due(self, version: int) -> bool:
        return bool(self._config.parity_every) and version >= self._due


@dataclass(frozen=True)
class _Kept:
    """What a version was, in host memory: this rank's shards."""

    version: int
    tensors: dict[str, torch.Tensor]


@contextmanager
def _in_place(model: TrainModel, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Yield the model with other weights. They are exchanged one by one, so no third copy is needed."""

    def exchange() -> None:
        with torch.no_grad():
            for name, parameter in model.trainable().items():
                mine = local_shard(parameter.detach())
                present, other = mine.to("cpu", copy=True), local_shard(tensors[name])
                mine.copy_(other)
                other.copy_(present)

    exchange()
    try:
        yield
    finally:
        exchange()


# --- metrics and alarm ------------------------------------------------------------------------


def limit_of(model: TrainModel) -> float:
    """Nats by which the mean may differ in the model's precision."""
    return LIMITS.get(model.dtype, max(LIMITS.values()))


def describe(prefix: str, tokens: ComparedTokens) -> dict[str, float]:
    """Metrics of tokens, `prefix_mean` and so on; nothing where there are none."""
    if not tokens.engine.size:
        return {}
    metrics = {
        f"{prefix}_{name}": float(value) for name, value in asdict(tokens.mismatch()).items()
    }
    if prefix == "parity":
        metrics |= {f"parity_mean_{name}": each.mean for name, each in tokens.by_seen().items()}
    return metrics


def alarm_of(same: ComparedTokens, limit: float) -> str:
    """Why engine and trainer do not agree on tokens of the same weights; empty if they do."""
    whole, kinds = same.mismatch(), same.by_seen()
    judged = {"all": whole, **kinds}
    beyond = {
        name: each
        for name, each in judged.items()
        if each.tokens >= LEAST_TOKENS and not each.mean <= limit
    }
    if not beyond:
        return ""
    told = ", ".join(f"{name} {each.mean:.2g}" for name, each in kinds.items())
    versions = sorted(set(same.versions.tolist()))
    sampled = f"v{versions[0]}" + (f" to v{versions[-1]}" if len(versions) > 1 else "")
    return (
        f"engine and trainer disagree on {whole.tokens} tokens of {sampled}, under the same weights: "
        f"log-probabilities differ by {whole.mean:.3g} nats on average, rounding allows "
        f"{limit:g}; at most {whole.max:.3g}, k3 KL {whole.kl:.3g}; by screens in the prompt: {told}; "
        f"first {same.first_beyond(limit)}. "
        f"{_likely(beyond)}; `dart doctor CONFIG --parity` compares without a run"
    )


def _likely(beyond: Mapping[str, Mismatch]) -> str:
    """Return the likely cause, by the kind of prompt that differs."""
    if "text" in beyond or "one" in beyond:
        return (
            "Likely a rollout worker with another model folder, dtype or temperature, an engine that "
            "did not take an update whole, or images that it resizes or normalises in its own way"
        )
    return (
        "One screen agrees, so likely the positions or the order of several images, or a prefix or "
        "encoder cache that outlived an update"
    )
