"""What tests of a GPU are marked with."""

from __future__ import annotations

import pytest
import torch

import tests.apart  # noqa: F401 - torch counts the devices that there are at a process's first backward pass

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

_CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])
DEVICES = ["cpu", "apart", _CUDA]
"""The same test on each; `apart` is a device that is not there (apart.py). For the fixture `device`."""

AUTOCASTING = ["cpu", _CUDA]
"""Of them, those for which torch has autocast."""
