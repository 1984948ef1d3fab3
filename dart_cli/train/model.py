"""The policy as the trainer sees it: log-probabilities of given tokens, with gradient.

    TrainModel   the trainable policy, and a frozen reference where the KL asks for one
    score        the shared forward pass, read at the completion tokens only

The forward pass, the forbidden tokens and the temperature are the engine's own
(dart_cli/policy/forward.py), so behaviour and policy log-probabilities mean the same distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dart_cli.algo.entropy import entropy
from dart_cli.config.schema import Config
from dart_cli.policy.device import pick_device
from dart_cli.policy.forward import logits, masked_logprobs
from dart_cli.policy.lora import adapters_off
from dart_cli.policy.model import LoadedPolicy, load_policy, weight_tensors
from dart_cli.train.batch import MicroBatch


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities and entropies of the completion tokens of a micro-batch."""

    logprobs: torch.Tensor  # [N], nats, of the distribution sampled from; with gradient
    entropies: torch.Tensor  # [N], nats, of the same; without gradient, unless requested


@dataclass(frozen=True)
class TrainModel:
    """The policy under training. `reference` is the model that the run started from, or None.

    With adapters it is the policy itself, which is scored without them then.
    """

    policy: LoadedPolicy
    reference: LoadedPolicy | None = None

    @classmethod
    def load(cls, config: Config) -> TrainModel:
        """The model that a configuration begins with. Raises ModelError."""
        device = pick_device(config.train.device)
        lora = config.model.lora
        policy = load_policy(
            config.model.path, config.model.dtype, device, lora=lora, seed=config.run.seed
        )
        if config.model.freeze_vision:
            inner: Any = policy.model.model
            inner.visual.requires_grad_(False)
        reference = None
        if config.train.kl_beta > 0 and lora is not None:
            reference = policy
        elif config.train.kl_beta > 0:
            reference = load_policy(config.model.path, config.model.dtype, device)
            reference.model.requires_grad_(False)
        return cls(policy, reference)

    def score(
        self, part: MicroBatch, temperature: float, *, entropy_gradient: bool = False
    ) -> TokenScores:
        """The policy's scores of a micro-batch."""
        return score(self.policy, part, temperature, entropy_gradient=entropy_gradient)

    @torch.no_grad()
    def reference_logprobs(self, part: MicroBatch, temperature: float) -> torch.Tensor | None:
        """The reference's log-probabilities [N]; None without a reference."""
        if self.reference is None:
            return None
        if self.reference is not self.policy:
            return score(self.reference, part, temperature).logprobs
        with adapters_off(self.policy.model):
            return score(self.policy, part, temperature).logprobs

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


def score(
    policy: LoadedPolicy, part: MicroBatch, temperature: float, *, entropy_gradient: bool = False
) -> TokenScores:
    """Log-probabilities and entropies of the completion tokens of `part`.

    A gradient of the entropies keeps one more [N, V] for the backward pass.
    """
    values = logits(policy.model, part.inputs, last=part.last)  # [B, last, V]
    device = values.device
    values = values[part.rows.to(device), part.columns.to(device)]  # [N, V]
    logprobs = masked_logprobs(values, policy.forbidden(device), temperature)
    chosen = logprobs.gather(1, part.token_ids.to(device)[:, None])[:, 0]
    return TokenScores(chosen, entropy(logprobs if entropy_gradient else logprobs.detach()))
