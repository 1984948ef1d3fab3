"""The model under supervised training: stages, updates, and the state to go on from.

    StageName    `head`: the pointer head and the rows of its three tokens alone; `all`: everything
    Trainer      one stage of one model
    TokenRows    the rows of a few tokens as parameters of their own, while the embedding stays as it is
    tuned        all that any stage changes; put_in, the same into a model

With adapters (`model.lora`) everything is the adapters, the pointer head and the rows of its tokens.
A stage ends with its tensors in the model. `state` and `restore` are exact: a stage that goes on from its
state makes the updates that it would have made.
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
_ROWS, _HELD = "pointer_rows", "pointer_rows.held"


class TokenRows:
    """Rows [K, H] in the place of those that the input embedding has for `tokens` [K]."""

    def __init__(self, embedding: nn.Module, tokens: Sequence[int]) -> None:
        weight: Any = embedding.weight
        self._weight: torch.Tensor = weight
        self._tokens = list(tokens)
        self.rows = nn.Parameter(weight.detach()[self._tokens].clone())
        self._hook = embedding.register_forward_hook(self._replace)

    def _replace(self, _: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> Any:
        ids = given[0]
        for row, token in zip(self.rows, self._tokens, strict=True):
            output = torch.where((ids == token)[..., None], row.to(output.dtype), output)
        return output

    @property
    def held(self) -> torch.Tensor:
        """The rows that the embedding has, meanwhile: of a tied one, those of the output."""
        return self._weight.detach()[self._tokens]

    @torch.no_grad()
    def hold(self, rows: torch.Tensor) -> None:
        """Write rows into the embedding; what is trained stays as it is."""
        self._weight[self._tokens] = rows.to(self._weight)

    def put_in(self) -> None:
        """Write the rows into the embedding, which is used as it is from now on."""
        self._hook.remove()
        self.hold(self.rows.detach())


def tuned(policy: LoadedPolicy) -> Tensors:
    """All that any stage changes, under the names of `Trainer.state`."""
    named = {name: each.detach() for name, each in policy.model.named_parameters()}
    if policy.lora is None:
        return named
    found = {name: each for name, each in named.items() if is_adapter(name)}
    if policy.pointing == "pointer":
        assert policy.pointer is not None
        found |= {name: each for name, each in named.items() if name.startswith(PREFIX)}
        embedding: Any = policy.model.get_input_embeddings()
        found[_ROWS] = embedding.weight.detach()[list(policy.pointer.triple)]
    return found


@torch.no_grad()
def put_in(policy: LoadedPolicy, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make what `tuned` gave the model's own."""
    named = dict(policy.model.named_parameters())
    for name, tensor in tensors.items():
        if name == _ROWS:
            assert policy.pointer is not None
            embedding: Any = policy.model.get_input_embeddings()
            embedding.weight[list(policy.pointer.triple)] = tensor.to(embedding.weight)
        elif name in named:
            named[name].copy_(tensor)


class Trainer:
    """One stage. The model's dtype is float32; `compute` is that of its products."""

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
        model.requires_grad_(stage == "all" and policy.lora is None)
        if stage == "all" and policy.lora is None:
            inner: Any = model.model
            inner.visual.requires_grad_(not freeze_vision)
        if stage == "all" and policy.lora is not None:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(is_adapter(name))
        model.eval()  # nothing is dropped but by the head
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
        if recompute:
            use_recompute(model)
        self._optimizer = torch.optim.AdamW(
            list(self.parameters.values()), lr=0.0, betas=BETAS, weight_decay=weight_decay
        )

    def update(self, passes: Iterator[Costs], lr: float) -> dict[str, float]:
        """One step on the sum of what `passes` cost; their metrics.

        Raises FloatingPointError, with the weights as they were.
        """
        metrics: dict[str, float] = {}
        self._optimizer.zero_grad(set_to_none=True)
        while True:
            with self._precision():  # of the forward pass, which is made when it is asked for
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
        if self._compute == torch.float32:
            return nullcontext()
        return torch.autocast(self._policy.device.type, self._compute)

    def finish(self) -> None:
        """End the stage: its tensors are the model's."""
        if self._rows is not None:
            self._rows.put_in()
        self._policy.model.eval()

    def state(self) -> Tensors:
        """Return what is trained, the optimizer's state and the generators': the tensors themselves."""
        found = state_of(self.parameters, self._optimizer)
        if self._rows is not None:
            found[_HELD] = self._rows.held
        found[_RNG] = torch.get_rng_state()
        if accelerator.is_gpu(self._policy.device):
            found[_DEVICE_RNG] = accelerator.rng_state(self._policy.device)
        return found

    def restore(self, tensors: Tensors) -> None:
        """Go on from a state. Raises ValueError where it is of other tensors."""
        generators = {name: tensors[name] for name in (_RNG, _DEVICE_RNG) if name in tensors}
        others = {name: each for name, each in tensors.items() if name not in generators}
        if missing := [name for name in self.parameters if name not in others]:
            raise ValueError(f"it has no {missing[0]}")
        if self._rows is not None:
            self._rows.hold(others.pop(_HELD, others[_ROWS]))
        restore(_Held(others), self.parameters, self._optimizer)
        torch.set_rng_state(generators[_RNG])
        if _DEVICE_RNG in generators and accelerator.is_gpu(self._policy.device):
            accelerator.set_rng_state(generators[_DEVICE_RNG], self._policy.device)


class _Held:
    """Tensors in memory, as dart_cli.train.base.SavedState."""

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
