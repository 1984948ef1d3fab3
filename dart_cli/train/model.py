"""The policy as the trainer sees it: log-probabilities of given tokens, with gradient.

    TrainModel   the trainable policy, and a frozen reference where the KL asks for one
    Scorer       the forward pass over a pack and the scores of its completion tokens, as one module

The forbidden tokens and the temperature are the engine's own (dart_cli/policy/forward.py), so behaviour
and policy log-probabilities mean the same distribution. The logits of all tokens are never in memory
together (dart_cli/algo/chunked.py).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from dart_cli.algo.chunked import token_scores
from dart_cli.config.schema import Config
from dart_cli.policy.device import pick_device
from dart_cli.policy.forward import ImageFeatures
from dart_cli.policy.lora import adapters_off
from dart_cli.policy.model import LoadedPolicy, load_policy, weight_tensors
from dart_cli.policy.packed import PackedInputs, packed_hidden
from dart_cli.policy.recompute import use_recompute
from dart_cli.train.batch import Pack


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities and entropies of the completion tokens of a pack."""

    logprobs: torch.Tensor  # [N], nats, of the distribution sampled from; with gradient
    entropies: torch.Tensor  # [N], nats, of the same; without gradient, unless requested


class Scorer(torch.nn.Module):
    """A model's forward pass and its scores in one call, so that hooks on it see both."""

    def __init__(self, policy: LoadedPolicy, chunk_tokens: int) -> None:
        super().__init__()
        self.model = policy.model
        self._policy = policy
        self._chunk_tokens = chunk_tokens

    def forward(
        self,
        inputs: PackedInputs,
        features: ImageFeatures | None,
        rows: torch.Tensor,
        token_ids: torch.Tensor,
        temperature: float,
        entropy_gradient: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies [N] of `token_ids` after the pack's tokens `rows`, nats."""
        hidden = packed_hidden(self.model, inputs, features=features)
        head: Any = self.model.get_output_embeddings()
        return token_scores(
            hidden[rows.to(hidden.device)],
            head.weight,
            token_ids.to(hidden.device),
            temperature=temperature,
            forbidden=self._policy.forbidden(hidden.device),
            chunk_tokens=self._chunk_tokens,
            entropy_gradient=entropy_gradient,
        )


@dataclass(frozen=True)
class TrainModel:
    """The policy under training. `reference` is the model that the run started from, or None.

    With adapters it is the policy itself, which is scored without them then.
    """

    policy: LoadedPolicy
    reference: LoadedPolicy | None = None
    chunk_tokens: int = 1024
    scorer: Scorer = field(init=False)
    reference_scorer: Scorer | None = field(init=False)

    def __post_init__(self) -> None:
        reference = self.reference and Scorer(self.reference, self.chunk_tokens)
        object.__setattr__(self, "scorer", Scorer(self.policy, self.chunk_tokens))
        object.__setattr__(self, "reference_scorer", reference)

    @classmethod
    def load(cls, config: Config) -> TrainModel:
        """The model that a configuration begins with. Raises ModelError."""
        device = pick_device(config.train.device)
        lora = config.model.lora
        policy = load_policy(
            config.model.path, config.model.dtype, device, lora=lora, seed=config.run.seed
        )
        inner: Any = policy.model.model
        if config.model.freeze_vision:
            inner.visual.requires_grad_(False)
        reference = None
        if config.train.kl_beta > 0 and lora is not None:
            reference = policy
        elif config.train.kl_beta > 0:
            reference = load_policy(config.model.path, config.model.dtype, device)
            reference.model.requires_grad_(False)
            if config.model.freeze_vision:  # the same tower: one copy is enough
                other: Any = reference.model.model
                other.visual = inner.visual
        if config.train.recompute == "layer":
            use_recompute(policy.model)
        return cls(policy, reference, config.train.chunk_tokens)

    def score(
        self, pack: Pack, temperature: float, *, entropy_gradient: bool = False
    ) -> TokenScores:
        """The policy's scores of a pack."""
        return _scores(self.scorer, pack, temperature, entropy_gradient)

    @torch.no_grad()
    def reference_logprobs(self, pack: Pack, temperature: float) -> torch.Tensor | None:
        """The reference's log-probabilities [N]; None without a reference."""
        if self.reference_scorer is None:
            return None
        without = (
            adapters_off(self.policy.model) if self.reference is self.policy else nullcontext()
        )
        with without:
            # Features are those of a frozen tower, which is as it was when the run started.
            return _scores(self.reference_scorer, pack, temperature).logprobs

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Parameters that are updated, by name."""
        named = self.policy.model.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def weights(self) -> dict[str, torch.Tensor]:
        """All tensors that are published, by name; they share the model's memory."""
        return weight_tensors(self.policy.model)

    def frozen(self) -> frozenset[str]:
        """Names of those that training does not change."""
        return frozenset(self.weights()) - self.trainable().keys()


def _scores(
    scorer: Scorer, pack: Pack, temperature: float, entropy_gradient: bool = False
) -> TokenScores:
    return TokenScores(
        *scorer(
            pack.inputs, pack.features, pack.rows, pack.token_ids, temperature, entropy_gradient
        )
    )
