"""The device a model runs on."""

from __future__ import annotations

import torch

from bus.errors import MissingPartError


def pick_device(asked: str) -> torch.device:
    """The device of a configuration's `device`; `auto` is the first GPU, else the CPU.

    Raises MissingPartError for a GPU that torch does not see.
    """
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(asked)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MissingPartError(
            f"device {asked}: torch sees {torch.cuda.device_count()} GPUs; "
            "install a CUDA build of torch, or set the device to auto or cpu"
        )
    return device
