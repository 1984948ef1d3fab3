"""Marks and parameters for tests on several devices."""

from __future__ import annotations

import pytest
import torch

import tests.apart  # noqa: F401 - torch counts the devices that there are at a process's first backward pass

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

_CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])
DEVICES = ["cpu", "apart", _CUDA]
"""Parameters for the fixture `device`: the test runs on each. `apart` is a pretended device (apart.py)."""

AUTOCASTING = ["cpu", _CUDA]
"""The devices for which torch has autocast."""
