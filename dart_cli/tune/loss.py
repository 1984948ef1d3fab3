"""The loss of a batch of examples: of the tokens of its answers, and of where their pointers point.

LossSettings   what is learned, and the form of the pointer's target
collate_batch  returns the tensors of examples
batch_loss     returns L_lm + L_ptr: sums over the examples, divided by the counts of the whole batch

L_lm   mean of -log p over the sampled tokens of the answers, in the distribution that is sampled from.
       Tokens that a pointer forces have probability 1 and are left out.
L_ptr  mean over pointers of KL(t || p) (arXiv 2506.03143, 3.3) and, with target v2p, of the
       probability outside the target (arXiv 2508.13634)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from dart_cli.algo.pointing import (
    box_target,
    gaussian_target,
    mass_outside,
    pointing_kl,
)
from dart_cli.policy.forward import (
    ModelInputs,
    image_features,
    last_hidden,
    masked_logprobs,
    vocabulary_logits,
)
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.tune.examples import Example

Target = Literal["box", "v2p"]


@dataclass(frozen=True)
class LossSettings:
    """What is learned, and the form of the pointer's target."""

    lm: bool = True  # whether the tokens of answers are learned
    target: Target = "box"


@dataclass(frozen=True)
class SftBatch:
    """The tensors of one forward pass."""

    inputs: ModelInputs
    last: int  # positions whose states are needed
    predicting: torch.Tensor  # [T, 2]: row, position among the last, that predicts a sampled token
    tokens: torch.Tensor  # [T]: that token
    pads: torch.Tensor  # [N, 2]: row, position among the last, of a pointer's pad
    pointed_images: list[int]  # [N]: index into inputs.images of the screenshot that it points at
    targets: list[torch.Tensor]  # [N] of [cells of that screenshot]


@dataclass
class Costs:
    """The costs of some examples: a loss with its gradient, and metrics."""

    loss: torch.Tensor | None = None
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, **values: float) -> None:
        """Add values to the metrics."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value


def counts_of(examples: Sequence[Example], policy: LoadedPolicy) -> tuple[int, int]:
    """Return the numbers of sampled tokens and of pointers of a batch, by which its sums are divided."""
    tokens = sum(len(_sampled(example.answer, policy)) for example in examples)
    return tokens, sum(example.box is not None for example in examples)


def collate_batch(
    policy: LoadedPolicy, examples: Sequence[Example], settings: LossSettings
) -> SftBatch:
    """Return the tensors of some examples."""
    sequences = [[*example.prompt.token_ids, *example.answer] for example in examples]
    inputs = policy.inputs(sequences, [example.prompt.images for example in examples])
    last = max(len(example.answer) for example in examples) + 1
    predicting: list[tuple[int, int]] = []
    tokens: list[int] = []
    pads: list[tuple[int, int]] = []
    pointed_images: list[int] = []
    targets: list[torch.Tensor] = []
    merge = policy.images.merge
    image_indices = iter(inputs.image_order)
    for row, example in enumerate(examples):
        first = last - len(example.answer)  # position of the answer's first token
        for index in _sampled(example.answer, policy):
            predicting.append((row, first + index - 1))
            tokens.append(example.answer[index])
        image = [next(image_indices) for _ in example.prompt.images][-1]
        if example.box is not None:
            assert policy.pointer is not None
            pads.append((row, first + example.answer.index(policy.pointer.pad)))
            pointed_images.append(image)
            _, rows, columns = inputs.images[image].grid
            targets.append(_target(example, rows // merge, columns // merge, settings))
    return SftBatch(
        inputs=inputs,
        last=last,
        predicting=torch.tensor(predicting).reshape(-1, 2),
        tokens=torch.tensor(tokens),
        pads=torch.tensor(pads, dtype=torch.long).reshape(-1, 2),
        pointed_images=pointed_images,
        targets=targets,
    )


def batch_loss(
    policy: LoadedPolicy, batch: SftBatch, settings: LossSettings, counts: tuple[int, int]
) -> Costs:
    """Return the loss of some examples; `counts` are the `counts_of` the whole batch."""
    model, device = policy.model, policy.device
    features = image_features(model, batch.inputs.images)
    states = last_hidden(model, batch.inputs, last=batch.last, features=features)
    costs = Costs()
    parts: list[torch.Tensor] = []
    # 1. The tokens of the answers
    if settings.lm:
        row, at = batch.predicting.to(device).unbind(1)
        values = vocabulary_logits(model, states[row, at])
        logprobs = masked_logprobs(values, policy.forbidden(device), 1.0)
        tokens = batch.tokens.to(device)
        nll = -logprobs.gather(1, tokens[:, None]).sum()
        parts.append(nll / counts[0])
        right = (logprobs.argmax(dim=1) == tokens).sum()
        costs.add(lm=nll.item() / counts[0], tokens_right=right.item() / counts[0])
    # 2. The pointers, screenshot by screenshot
    if batch.targets:
        head = policy.pointer_head
        assert head is not None
        row, at = batch.pads.to(device).unbind(1)
        queries = states[row, at]
        for image in dict.fromkeys(batch.pointed_images):
            pointers = [i for i, index in enumerate(batch.pointed_images) if index == image]
            target = torch.stack([batch.targets[i] for i in pointers]).to(device)
            logits = head.logits(queries[pointers], head.keys(features.embeds[image]))
            kl, outside = pointing_kl(logits, target), mass_outside(logits, target)
            loss = kl + outside if settings.target == "v2p" else kl
            parts.append(loss.sum() / counts[1])
            hits = (target.gather(1, logits.argmax(dim=1, keepdim=True)) > 0).sum()
            costs.add(
                pointer=kl.sum().item() / counts[1],
                outside=outside.sum().item() / counts[1],
                cells_right=hits.item() / counts[1],
            )
    costs.loss = torch.stack([part.float() for part in parts]).sum()
    costs.add(loss=costs.loss.item())
    return costs


def _sampled(answer: Sequence[int], policy: LoadedPolicy) -> list[int]:
    """Return the indices of the tokens that no pointer forces."""
    pointer = policy.pointer
    return [
        index
        for index in range(len(answer))
        if index == 0 or pointer is None or pointer.forced_after(answer[index - 1]) is None
    ]


def _target(example: Example, rows: int, columns: int, settings: LossSettings) -> torch.Tensor:
    """Return the target of a pointer over the cells of its screenshot."""
    assert example.box is not None
    if settings.target == "v2p":
        return gaussian_target(example.box, rows, columns)
    return box_target(example.box, rows, columns)
