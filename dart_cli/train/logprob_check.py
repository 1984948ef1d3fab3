"""The log-probability check: on each batch, do engine and trainer compute the same distribution?

    ComparedTokens       tokens with the log-probabilities of engine and trainer
    compare              the sampled tokens of a pack that has just been scored
    step_mismatches      how far the two differ in each step, for the viewer; sent with BatchTrained
    LogprobCheck         makes the metrics, keeps weights for comparison, decides when the run must stop
    rescore              scores a batch, and returns its tokens for the comparison
    limit_of             the largest mean difference that rounding explains, in nats
    describe             tokens -> metrics; `dart doctor --parity` reports the same
    alarm_of             tokens -> why the run must stop, in words

Only tokens that a single version sampled can be compared, and only with the weights of that version:

- Tokens of the present weights are scored by the update's first pass anyway.
- If the trainer is always ahead of its batches, there are no such tokens. Then, every `parity_every`
  versions, the check keeps a copy of the weights until samples of that version arrive, and scores a few of
  these with the copy in place of the present weights.

All other tokens are stale: their difference shows how far the policy has moved, and never stops the run.

Prompts are distinguished by their number of screens (none, one, several), because an error with images often
shows in one of these kinds only: with several screens, their positions and order matter.
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
"""Largest mean difference, nats. Rounding alone makes a mean of about 1e-6 in float32 and of 0.01 to 0.03 in
bfloat16, where engine and trainer add in another order; other weights or another temperature make more.

Recurrent layers need no other limit. The trainer and the engine's prefill compute them in chunks, decoding
token by token, which adds in another order again. On prompts of 50 to 2,000 tokens a small random qwen3_5 has
a mean of 1.1e-6 in float32 (qwen3_vl 0.5e-6) and of 0.002 in bfloat16 (qwen3_vl 0.004), where the rule itself
stays float32. Engine and trainer are each 1.3e-6 from float64."""

LEAST_TOKENS = 32
"""The mean of fewer tokens is not meaningful: one unlikely token may differ much in bfloat16."""

RESCORED = 64
"""Most samples of a batch that are scored with the weights of an earlier version."""

STALEST = 16
"""The check waits for samples of kept weights for this many versions."""

SCREENS = ("text", "one", "several")
"""Kinds of prompts by how many screens they show: none, one, more."""


@dataclass(frozen=True)
class ComparedTokens:
    """Tokens [N] that an engine sampled, with two log-probabilities each, in nats."""

    engine: NDArray[np.float64]
    trainer: NDArray[np.float64]
    versions: NDArray[np.int64]  # the version that sampled it; -1 if no single one did
    screens: NDArray[np.int64]  # the kind of its prompt, an index into SCREENS
    places: NDArray[np.int64]  # index of its completion in `steps`
    indices: NDArray[np.int64]  # of the token in its completion
    steps: tuple[str, ...] = field(kw_only=True)
    """The completions in words: trajectory, step and rollout worker."""

    @classmethod
    def of(
        cls,
        engine: ArrayLike,
        trainer: ArrayLike,
        versions: ArrayLike,
        screens: ArrayLike,
        places: ArrayLike,
        indices: ArrayLike,
        steps: Sequence[str],
    ) -> ComparedTokens:
        """Return tokens with these columns [N], converted to the types above."""
        return cls(
            engine=np.asarray(engine, dtype=np.float64),
            trainer=np.asarray(trainer, dtype=np.float64),
            versions=np.asarray(versions, dtype=np.int64),
            screens=np.asarray(screens, dtype=np.int64),
            places=np.asarray(places, dtype=np.int64),
            indices=np.asarray(indices, dtype=np.int64),
            steps=tuple(steps),
        )

    def only(self, mask: NDArray[np.bool_]) -> ComparedTokens:
        """Return the tokens at which `mask` [N] is set."""
        *columns, steps = vars(self).values()
        return ComparedTokens(*(column[mask] for column in columns), steps=steps)

    def mismatch(self) -> Mismatch:
        """Return how far the two log-probabilities are apart."""
        return mismatch(self.engine, self.trainer)

    def first_beyond(self, limit: float) -> str:
        """Return a description of the first token beyond `limit` nats in the completion with the largest gap.

        Return an empty string if no token is beyond the limit.
        """
        gaps = np.abs(self.engine - self.trainer)
        beyond = ~(gaps <= limit)  # also True if the gap is not a number
        if not beyond.any():
            return ""
        worst = self.places[np.where(np.isnan(gaps), np.inf, gaps).argmax()]
        at = np.flatnonzero(beyond & (self.places == worst))[0]
        return (
            f"token {self.indices[at]} of {self.steps[worst]}, v{self.versions[at]}: "
            f"{self.engine[at]:.3f} there, {self.trainer[at]:.3f} here"
        )

    def by_screens(self) -> dict[str, Mismatch]:
        """Return the mismatch for each kind of prompt (SCREENS) of which there are tokens."""
        kinds = {name: self.only(self.screens == index) for index, name in enumerate(SCREENS)}
        return {name: part.mismatch() for name, part in kinds.items() if part.engine.size}


def compare(logprobs: torch.Tensor, pack: Pack) -> ComparedTokens:
    """Return the sampled tokens of a pack; the trainer's log-probabilities of them are `logprobs` [N].

    It leaves out demonstrations, which no engine sampled, and tokens that a pointer forces.
    """
    lengths = np.array(pack.lengths, dtype=np.int64)  # empty if this rank has no work
    begins = np.repeat(lengths.cumsum() - lengths, lengths)
    screens = np.array(
        [min(sample.images, len(SCREENS) - 1) for sample in pack.samples], dtype=np.int64
    )
    whole = ComparedTokens(
        engine=pack.behaviour_logprobs.numpy(),
        trainer=logprobs.detach().double().cpu().numpy(),
        versions=pack.versions.numpy(),
        screens=np.repeat(screens, lengths),
        places=np.repeat(np.arange(len(lengths)), lengths),
        indices=np.arange(len(begins)) - begins,
        steps=tuple(_in_words(sample) for sample in pack.samples),
    )
    return whole.only((pack.is_drawn & ~pack.unknown).numpy())


def _in_words(sample: Sample) -> str:
    by = f", sampled by {sample.worker}" if sample.worker else ""
    return f"step {sample.step} of {sample.trajectory_id}{by}"


def step_mismatches(proximal: torch.Tensor, pack: Pack) -> list[StepMismatch]:
    """Return the mismatch of each sample of `pack`, over the tokens that were drawn.

    `proximal` [N] are the trainer's log-probabilities before the update. Samples whose mean gap is not
    finite are left out: the note or alarm of the update reports these.
    """
    count = len(pack.samples)
    is_drawn = pack.is_drawn.numpy()
    gaps = (proximal.double().cpu() - pack.behaviour_logprobs).numpy()[is_drawn]
    owners = np.repeat(np.arange(count), pack.lengths)[is_drawn]  # the sample of each token
    largest = np.zeros(count)
    np.maximum.at(largest, owners, np.abs(gaps))
    with np.errstate(invalid="ignore"):  # a sample without such a token has no mean
        means = np.bincount(owners, weights=gaps, minlength=count) / np.bincount(
            owners, minlength=count
        )
    return [
        StepMismatch(trajectory_id=sample.trajectory_id, step=sample.step, mean=mean, largest=most)
        for sample, mean, most in zip(pack.samples, means.tolist(), largest.tolist(), strict=True)
        if sample.behaviour_logprobs and isfinite(mean)
    ]


def concatenate(parts: Sequence[ComparedTokens]) -> ComparedTokens:
    """Return the tokens of all parts."""
    if not parts:
        return ComparedTokens.of([], [], [], [], [], [], ())
    offsets = np.cumsum([0, *(len(part.steps) for part in parts)])
    parts = [
        replace(part, places=part.places + offset)
        for part, offset in zip(parts, offsets, strict=False)
    ]
    *columns, steps = zip(*(vars(part).values() for part in parts), strict=True)
    return ComparedTokens(*map(np.concatenate, columns), steps=tuple(chain.from_iterable(steps)))


def rescore(model: TrainModel, batch: Batch, pack_tokens: int) -> ComparedTokens:
    """Score a batch by the trainer's forward pass and return its sampled tokens.

    Raises as `check_batch` does (packs/batch_check.py).
    """
    check_batch(batch, model.policy)
    [part] = packed_batches(batch, model.policy, pack_tokens=pack_tokens)
    return rescore_part(model, part)


@torch.no_grad()
def rescore_part(model: TrainModel, part: PackedBatch) -> ComparedTokens:
    """Score a rank's part of a batch by the trainer's forward pass and return its sampled tokens."""
    weights = [1.0] * len(part.batch.samples)
    with PackFeed(part, weights, model.policy) as packs:
        tokens = [
            compare(model.score(pack, part.batch.temperature).logprobs, pack) for pack in packs
        ]
    model.reshard()
    return concatenate(tokens)


class LogprobCheck:
    """The check of one trainer, batch by batch. Not thread-safe: only the learner's thread may call it."""

    def __init__(self, config: TrainConfig, model: TrainModel) -> None:
        self._config = config
        self._model = model
        self._limit = limit_of(model)
        self._due = -1  # versions from this one on are to be compared
        self._copy: _WeightsCopy | None = None

    def earlier_samples(self, batch: Batch, version: int | None) -> tuple[Batch, int | None]:
        """Return a batch of the samples to be scored with the copy of earlier weights, and its version.

        These are up to RESCORED samples that began with that version. The second item is None if there are
        none. `version` is the published version of the present weights, None if they were not published.
        """
        # After a skipped update the copy may equal the present weights: then there is nothing to do.
        copy = None if self._copy is None or self._copy.version == version else self._copy.version
        samples = [
            sample
            for sample in batch.samples
            if sample.weight != 0
            and sample.behaviour_logprobs
            and any(s.start == 0 and s.version == copy for s in sample.version_spans)
        ]
        earlier = batch.model_copy(update={"samples": samples[:RESCORED]})
        return earlier, copy if samples else None

    def rescore_earlier(self, part: PackedBatch, version: int | None) -> ComparedTokens:
        """Score a rank's part of `earlier_samples` with the weights of `version`; return its tokens."""
        if version is None or not part.packs:
            return concatenate([])
        # earlier_samples named the version of the copy, and all ranks have a copy.
        assert self._copy is not None
        with _exchanged_weights(self._model, self._copy.tensors):
            scored = rescore_part(self._model, part)
        return scored.only(scored.versions == version)

    def report(
        self, tokens: ComparedTokens, earlier: ComparedTokens, version: int | None
    ) -> tuple[dict[str, float], str]:
        """Return metrics of a batch, and why the run must stop (empty if it need not).

        `tokens` are all sampled tokens of the batch, scored with the present weights; `version` is the number
        under which these were published, None if they were not. `earlier` are tokens scored with a copy.
        """
        fresh = tokens.versions == (-2 if version is None else version)
        same = concatenate([tokens.only(fresh), earlier])
        metrics = describe("parity", same) | describe("stale", tokens.only(~fresh))
        if not self._config.parity_every or same.engine.size < LEAST_TOKENS:
            return metrics, ""
        newest = int(same.versions.max())
        self._due = max(self._due, newest + self._config.parity_every)
        if self._copy is not None and self._copy.version <= newest:
            self._copy = None
        return metrics, alarm_of(same, self._limit)

    def keep(self, version: int | None) -> None:
        """Copy the present weights, which are about to change, if `version` is still to be compared."""
        if version is None or not self._is_due(version):
            return
        if self._copy is None or version - self._copy.version > STALEST:
            copies = {
                name: local_shard(value.detach()).to("cpu", copy=True)
                for name, value in self._model.trainable().items()
            }
            self._copy = _WeightsCopy(version, copies)

    def _is_due(self, version: int) -> bool:
        return bool(self._config.parity_every) and version >= self._due


@dataclass(frozen=True)
class _WeightsCopy:
    """A copy of a version's trained weights in host memory: the shards of this rank."""

    version: int
    tensors: dict[str, torch.Tensor]


@contextmanager
def _exchanged_weights(model: TrainModel, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Give the model the weights `tensors` inside the block.

    Tensors are exchanged one by one, so that no third copy is needed.
    """

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
    """Return the nats by which the mean may differ in the model's precision."""
    return LIMITS.get(model.dtype, max(LIMITS.values()))


def describe(prefix: str, tokens: ComparedTokens) -> dict[str, float]:
    """Return metrics of tokens, named `prefix_mean` and so on; empty without tokens."""
    if not tokens.engine.size:
        return {}
    metrics = {
        f"{prefix}_{name}": float(value) for name, value in asdict(tokens.mismatch()).items()
    }
    if prefix == "parity":
        kinds = tokens.by_screens()
        metrics |= {f"parity_mean_{name}": gaps.mean for name, gaps in kinds.items()}
    return metrics


def alarm_of(same: ComparedTokens, limit: float) -> str:
    """Return how engine and trainer disagree on tokens of the same weights, in words; empty if they agree."""
    whole, kinds = same.mismatch(), same.by_screens()
    beyond = {
        name: gaps
        for name, gaps in {"all": whole, **kinds}.items()
        if gaps.tokens >= LEAST_TOKENS and not gaps.mean <= limit
    }
    if not beyond:
        return ""
    means = ", ".join(f"{name} {gaps.mean:.2g}" for name, gaps in kinds.items())
    versions = sorted(set(same.versions.tolist()))
    sampled = f"v{versions[0]}" + (f" to v{versions[-1]}" if len(versions) > 1 else "")
    return (
        f"engine and trainer disagree on {whole.tokens} tokens of {sampled}, under the same weights: "
        f"log-probabilities differ by {whole.mean:.3g} nats on average, rounding allows "
        f"{limit:g}; at most {whole.max:.3g}, k3 KL {whole.kl:.3g}; by screens in the prompt: {means}; "
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
