"""AdamW: its decay rates; trained parameters and its state as one flat dict of tensors, and back.

state_of   `parameter` -> the parameter, `parameter/name` -> the optimizer's state, e.g. `/exp_avg`
restore    the same from a checkpoint, in place; on any number of ranks
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dart_cli.train.base import SavedState, Tensors

BETAS = (0.9, 0.99)
"""Of the moments. The second is 0.99, not 0.999: a run has some hundred updates."""


def state_of(parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> Tensors:
    """The tensors themselves, which the next update changes. Before the first there is no state."""
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    moments = {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for key, value in optimizer.state[parameter].items()
    }
    return weights | moments


@torch.no_grad()
def restore(
    saved: SavedState, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Read the parameters and the optimizer's state. What is not saved stays, or begins anew.

    A state of its parameter's shape is made like it: on its device, and sharded as it is. Raises
    ValueError for another shape than the parameter's, before anything has changed.
    """
    targets = {name: value.detach() for name, value in parameters.items() if name in saved.names}
    states: dict[str, dict[str, torch.Tensor]] = {}
    for key in sorted(saved.names):  # in one order on all ranks, whose collectives follow it
        name, _, part = key.rpartition("/")
        if name not in parameters:
            continue
        parameter, dtype, shape = parameters[name], saved.dtype(key), saved.shape(key)
        value = (
            torch.zeros_like(parameter, dtype=dtype)
            if shape == tuple(parameter.shape)
            else torch.zeros(shape, dtype=dtype, device=parameter.device)
        )
        states.setdefault(name, {})[part] = targets[key] = value
    saved.fill(targets)
    optimizer.state.clear()
    for name, parts in states.items():
        optimizer.state[parameters[name]] = parts
