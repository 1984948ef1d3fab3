"""The device a model runs on."""

from __future__ import annotations

import torch

from bus.errors import MissingPartError


def pick_device(asked: str) -> torch.device:
    """The device of a configuration's `device`; `auto` is the first GPU, else the CPU.

    A GPU has its number, without which `torch.cuda.set_device` takes none. Raises MissingPartError for
    one that torch does not see.
    """
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cuda:0" if asked == "cuda" else asked)
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise MissingPartError(
            f"device {asked}: torch sees {torch.cuda.device_count()} GPUs; "
            "install a CUDA build of torch, or set the device to auto or cpu"
        )
    return device
