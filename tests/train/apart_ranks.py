"""The program of the ranks of tests/train/test_apart.py: trainers on a pretended device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.apart import KIND, pretend
from tests.train import rank_cases
from tests.train.rank_cases import Case

BACKEND = f"cpu:gloo,{KIND}:gloo"


def updated(rank: int, size: int, folder: Path, cases: dict[str, Case]) -> dict[str, Any]:
    """Run rank_cases.updated on the pretended GPU of this process."""
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        return rank_cases.updated(rank, size, folder, cases, f"{KIND}:0")
