"""Promises of the choice of a device."""

from __future__ import annotations

import pytest
import torch

from bus.errors import MissingPartError
from dart_cli.hardware.device import pick_device


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("asked", "index"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_has_its_number_so_that_torch_can_make_it_the_current_one(
    asked: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", made.append, raising=False)
    torch.cuda.set_device(pick_device(asked))
    assert made == [index]


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_torch_does_not_see_is_refused_by_name() -> None:
    with pytest.raises(MissingPartError, match="device cuda:2: torch sees 2 GPUs"):
        pick_device("cuda:2")


def test_without_a_gpu_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")
