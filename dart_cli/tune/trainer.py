"""One stage of a supervised training: what is trained, the updates, and the state to continue from.

    StageName         `head`: the pointer head and the rows of its three tokens are trained; `all`: everything is
    Trainer           trains one model in one stage
    TokenRows         the embeddings of a few tokens as separate parameters, while the embedding matrix stays
    changed_tensors   all tensors of a model that any stage changes
    load_tensors      writes such tensors into a model

With adapters (`model.lora`), "everything" is the adapters, the pointer head and the rows of its tokens. A
stage ends with its tensors in the model. `state` and `restore` are exact: a stage that continues from a saved
state makes the same updates as without the interruption.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from dart_cli.config.architecture import PREFIX
from dart_cli.hardware import accelerator
from dart_cli.policy.loader import LoadedPolicy
from dart_cli.policy.lora import is_adapter
from dart_cli.policy.packed import use_recompute
from dart_cli.train.base import BETAS, Tensors, restore, state_of
from dart_cli.tune.loss import Costs

StageName = Literal["head", "all"]

_RNG, _DEVICE_RNG = "rng", "rng.device"
_ROWS, _MATRIX_ROWS = "pointer_rows", "pointer_rows.held"


class TokenRows:
    """Trained rows [K, H] that replace the rows of the input embedding for `tokens` [K]."""

    def __init__(self, embedding: nn.Module, tokens: Sequence[int]) -> None:
        weight: Any = embedding.weight
        self._weight: torch.Tensor = weight
        self._tokens = list(tokens)
        self.rows = nn.Parameter(weight.detach()[self._tokens].clone())
        self._hook = embedding.register_forward_hook(self._replace)

    def _replace(
        self, _: nn.Module, arguments: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> Any:
        """Return the embedding's output with the trained rows in place of the tokens' own."""
        ids = arguments[0]
        for row, token in zip(self.rows, self._tokens, strict=True):
            output = torch.where((ids == token)[..., None], row.to(output.dtype), output)
        return output

    @property
    def matrix_rows(self) -> torch.Tensor:
        """The rows in the embedding matrix itself, which the output head uses where the two are tied."""
        return self._weight.detach()[self._tokens]

    @torch.no_grad()
    def write_matrix_rows(self, rows: torch.Tensor) -> None:
        """Write rows into the embedding matrix. The trained rows do not change."""
        self._weight[self._tokens] = rows.to(self._weight)

    def finish(self) -> None:
        """Write the trained rows into the embedding matrix, which is used from now on."""
        self._hook.remove()
        self.write_matrix_rows(self.rows.detach())


def changed_tensors(policy: LoadedPolicy) -> Tensors:
    """Return all tensors that any stage changes, by the names of `Trainer.state`."""
    parameters = {name: tensor.detach() for name, tensor in policy.model.named_parameters()}
    if policy.lora is None:
        return parameters
    tensors = {name: tensor for name, tensor in parameters.items() if is_adapter(name)}
    if policy.pointing == "pointer":
        assert policy.pointer is not None
        tensors |= {name: tensor for name, tensor in parameters.items() if name.startswith(PREFIX)}
        embedding: Any = policy.model.get_input_embeddings()
        tensors[_ROWS] = embedding.weight.detach()[list(policy.pointer.triple)]
    return tensors


@torch.no_grad()
def load_tensors(policy: LoadedPolicy, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the tensors that `changed_tensors` returned into a model."""
    parameters = dict(policy.model.named_parameters())
    for name, tensor in tensors.items():
        if name == _ROWS:
            assert policy.pointer is not None
            embedding: Any = policy.model.get_input_embeddings()
            embedding.weight[list(policy.pointer.triple)] = tensor.to(embedding.weight)
        elif name in parameters:
            parameters[name].copy_(tensor)


class Trainer:
    """Trains one model in one stage. Its weights are float32; `compute` is the dtype of products."""

    def __init__(
        self,
        policy: LoadedPolicy,
        stage: StageName,
        *,
        weight_decay: float,
        grad_clip: float,
        compute: torch.dtype = torch.float32,
        freeze_vision: bool = False,
        recompute: bool = False,
        dropout: bool = True,
    ) -> None:
        self._policy = policy
        self._grad_clip = grad_clip
        self._compute = compute
        self._rows: TokenRows | None = None
        model, head = policy.model, policy.pointer_head
        # 1. Choose what is trained
        model.requires_grad_(stage == "all" and policy.lora is None)
        if stage == "all" and policy.lora is None:
            inner: Any = model.model
            inner.visual.requires_grad_(not freeze_vision)
        if stage == "all" and policy.lora is not None:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(is_adapter(name))
        model.eval()  # only the head has dropout
        if head is not None:
            head.requires_grad_(policy.pointing == "pointer")
            head.train(dropout and policy.pointing == "pointer")
        points = policy.pointing == "pointer"
        if points and (stage == "head" or policy.lora is not None):
            assert policy.pointer is not None
            self._rows = TokenRows(model.get_input_embeddings(), policy.pointer.triple)
        self.parameters: dict[str, torch.Tensor] = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        if self._rows is not None:
            self.parameters[_ROWS] = self._rows.rows
        # 2. Make the optimizer
        if recompute:
            use_recompute(model)
        self._optimizer = torch.optim.AdamW(
            list(self.parameters.values()), lr=0.0, betas=BETAS, weight_decay=weight_decay
        )

    def update(self, passes: Iterator[Costs], lr: float) -> dict[str, float]:
        """Make one update on the sum of the costs of `passes`, and return their metrics.

        Raises FloatingPointError if the gradient is not finite; the weights do not change then.
        """
        metrics: dict[str, float] = {}
        self._optimizer.zero_grad(set_to_none=True)
        while True:
            with self._precision():  # the forward pass runs inside `next`
                costs = next(passes, None)
            if costs is None:
                break
            assert costs.loss is not None
            costs.loss.backward()  # type: ignore[no-untyped-call]
            for name, value in costs.sums.items():
                metrics[name] = metrics.get(name, 0.0) + value
        norm = nn.utils.clip_grad_norm_(list(self.parameters.values()), self._grad_clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {norm.item()}")
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        return {**metrics, "grad_norm": norm.item(), "lr": lr}

    def _precision(self) -> AbstractContextManager[Any]:
        """Return the context in which products are computed in the dtype `compute`."""
        if self._compute == torch.float32:
            return nullcontext()
        return torch.autocast(self._policy.device.type, self._compute)

    def finish(self) -> None:
        """End the stage: write its tensors into the model."""
        if self._rows is not None:
            self._rows.finish()
        self._policy.model.eval()

    def state(self) -> Tensors:
        """Return the trained tensors and the states of optimizer and random generators, not copied."""
        tensors = state_of(self.parameters, self._optimizer)
        if self._rows is not None:
            tensors[_MATRIX_ROWS] = self._rows.matrix_rows
        tensors[_RNG] = torch.get_rng_state()
        if accelerator.is_gpu(self._policy.device):
            tensors[_DEVICE_RNG] = accelerator.rng_state(self._policy.device)
        return tensors

    def restore(self, tensors: Tensors) -> None:
        """Continue from a state. Raises ValueError if it has other tensors."""
        generators = {name: tensors[name] for name in (_RNG, _DEVICE_RNG) if name in tensors}
        others = {name: tensor for name, tensor in tensors.items() if name not in generators}
        if missing := [name for name in self.parameters if name not in others]:
            raise ValueError(f"it has no {missing[0]}")
        if self._rows is not None:
            self._rows.write_matrix_rows(others.pop(_MATRIX_ROWS, others[_ROWS]))
        restore(_TensorsInMemory(others), self.parameters, self._optimizer)
        torch.set_rng_state(generators[_RNG])
        if _DEVICE_RNG in generators and accelerator.is_gpu(self._policy.device):
            accelerator.set_rng_state(generators[_DEVICE_RNG], self._policy.device)


class _TensorsInMemory:
    """Tensors in memory, with the methods of dart_cli.train.base.SavedState."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    @torch.no_grad()
    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        for name, target in targets.items():
            if name not in self._tensors or self.shape(name) != tuple(target.shape):
                raise ValueError(f"{name} has another shape")
        for name, target in targets.items():
            target.copy_(self._tensors[name])
