"""The device that a model runs on, and the error when its memory is too small.

pick_device    returns the device that a configuration asks for
check_memory   a context manager: if its block runs out of memory, it raises an error that names the fix
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bus.errors import DartError, MissingPartError, first_line, is_out_of_memory
from dart_cli.hardware import accelerator

_SMALLER = (
    'load a smaller model, or set model.dtype = "bfloat16"; '
    "`dart doctor CONFIG` says what a run takes"
)


def pick_device(name: str) -> torch.device:
    """Return the device of a configuration's `device`; `auto` is the first GPU, or the CPU without one.

    The index of a GPU is always set, because torch cannot make a device without an index the current one.
    Raises MissingPartError for a GPU that torch does not see.
    """
    if name == "auto":
        name = accelerator.KIND if accelerator.is_available() else "cpu"
    device = torch.device(f"{name}:0" if name == accelerator.KIND else name)
    if accelerator.is_gpu(device) and device.index >= accelerator.device_count():
        raise MissingPartError(
            f"device {name}: torch sees {accelerator.device_count()} GPUs; "
            "install a CUDA build of torch, or set the device to auto or cpu"
        )
    return device


@contextmanager
def check_memory(
    what: str | Path, device: str | torch.device, fix: str = _SMALLER
) -> Iterator[None]:
    """Raise DartError if the block runs out of memory on `device` while it makes `what`.

    `fix` ends the message. DartError does not count as the user's mistake: another process may hold the
    memory for now, so a supervisor tries again.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise DartError(
            f"{what} does not fit into the memory of {device} ({first_line(error)}); end what else uses it "
            f"(nvidia-smi lists it for a GPU), or {fix}"
        ) from None
