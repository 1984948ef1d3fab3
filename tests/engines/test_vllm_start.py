"""What vLLM's engine finds out without vLLM: causes, devices, sets that it cannot take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bus.errors import WeightsError
from dart_cli.engines.vllm.set_files import open_files
from dart_cli.engines.vllm.start import _environment, _visible, root_cause


def raised(text: str) -> BaseException:
    """An error that was raised while another was handled."""
    try:
        try:
            raise ValueError(text)
        except ValueError as error:
            raise RuntimeError(
                "Engine core initialization failed. See root cause above."
            ) from error
    except RuntimeError as error:
        return error


def test_the_first_cause_is_one_line_with_what_to_change() -> None:
    told = root_cause(raised("CUDA out of memory.\nTried to allocate 20 GiB"))
    assert told.startswith("ValueError: CUDA out of memory. Tried to allocate 20 GiB")
    assert "vllm.gpu_memory_utilization" in told
    assert "kv_cache_memory_bytes" in root_cause(
        ValueError("Available memory on node 0 (1/14 GiB)")
    )
    assert "log" in root_cause(RuntimeError("Engine core initialization failed"))


@pytest.mark.parametrize(
    ("chosen", "device", "meant"),
    [(None, "cuda:1", "1"), ("4,6", "cuda:1", "6"), ("GPU-abc", "cuda:0", "GPU-abc")],
)
def test_a_numbered_device_is_one_of_those_the_process_sees(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, device: str, meant: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert _visible(device) == meant


@pytest.mark.parametrize("chosen", [None, "4,6"])
def test_vllms_processes_see_one_gpu_and_this_one_sees_all_afterwards(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    seen = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    monkeypatch.setattr("os.environ", dict(seen))
    with _environment("cuda:1", 1):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ("1" if chosen is None else "6")
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == chosen


def test_a_set_that_is_removed_while_it_is_open_is_read_all_the_same(tmp_path: Path) -> None:
    names = ("frozen.safetensors", "model.safetensors")
    for name in names:
        (tmp_path / name).write_text(name)
    with open_files(tmp_path) as files:
        for name in names:
            (tmp_path / name).unlink()
        assert sorted(Path(file).read_text() for file in files) == list(names)


def test_a_set_that_has_gone_is_an_error_and_no_empty_update(tmp_path: Path) -> None:
    with (
        pytest.raises(WeightsError, match="removed while it was read"),
        open_files(tmp_path / "gone"),
    ):
        pass
