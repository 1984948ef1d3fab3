"""What vLLM needs beside its packages is named with its cure, where it would run on a GPU of this host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dart_cli.doctor import vllm_parts
from tests.doctor.parts import doctor, worst

CUDA: dict[str, Any] = {"version": "2.13.0", "cuda": "13.0", "gpus": 0}
CPU: dict[str, Any] = {"version": "2.13.0+cpu", "cuda": None, "gpus": 0}


def executable(path: Path, text: str = "") -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host whose only program is nvidia-smi, of a driver that is too old, without Python.h."""
    programs = tmp_path / "bin"
    programs.mkdir()
    answer = 'case "$1" in *driver*) echo 570.86.10;; *) echo "H100, 81559 MiB, 0 MiB";; esac'
    executable(programs / "nvidia-smi", answer)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(vllm_parts, "ask_torch", lambda: CUDA)
    monkeypatch.setattr(vllm_parts, "python_header", lambda: tmp_path / "include" / "Python.h")
    return programs


def test_each_part_that_is_missing_is_an_error_with_its_cure(box: Path) -> None:
    result = {each.subject: each for each in vllm_parts.vllm_parts()}
    assert {each.level for each in result.values()} == {"error"}
    assert result["compiler"].cure == "apt install build-essential"
    assert result["Python.h"].cure.startswith("apt install python3-dev")
    assert "570.86.10, and CUDA 13.0 needs 580 or newer" in result["driver"].text


def test_what_is_there_is_ok(box: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    executable(box / "gcc")
    monkeypatch.setattr(vllm_parts, "ask_torch", lambda: CUDA | {"gpus": 8})  # by its own libraries
    findings = list(vllm_parts.vllm_parts())
    assert [each.subject for each in findings] == ["compiler", "Python.h", "driver"]
    assert worst(findings).level == "ok"


@pytest.mark.parametrize(
    ("chosen", "level", "part"),
    [
        (None, "ok", "/gcc"),
        ("my-cc", "ok", "/my-cc"),
        ("no-such-cc", "error", "CC = no-such-cc is not a program"),
        ("", "error", "CC =  is not a program"),
    ],
)
def test_the_compiler_is_the_one_that_triton_takes(
    box: Path, chosen: str | None, level: str, part: str
) -> None:
    executable(box / "gcc")
    executable(box / "my-cc")
    result = vllm_parts.check_compiler(chosen)
    assert result.level == level
    assert part in result.text


@pytest.mark.parametrize(
    ("version", "cuda", "level"),
    [
        ("580.65.06", "13.0", "ok"),
        ("579.99", "13.0", "error"),
        ("535.104.05", "12.9", "ok"),
        ("470.57", "12.9", "error"),
        ("570.10", "14.1", None),
        ("[N/A]", "13.0", None),
    ],
)
def test_a_driver_is_held_to_the_cuda_of_torch(version: str, cuda: str, level: str | None) -> None:
    findings = list(vllm_parts.check_driver(version, CUDA | {"cuda": cuda}))
    assert [each.level for each in findings] == ([level] if level else [])


def test_nothing_is_asked_of_a_host_that_serves_on_its_cpu(
    box: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_parts, "ask_torch", lambda: CPU)
    assert not list(vllm_parts.vllm_parts())
    monkeypatch.setattr(vllm_parts, "ask_torch", lambda: CUDA)
    (box / "nvidia-smi").unlink()
    assert not list(vllm_parts.vllm_parts())


@pytest.mark.parametrize("engine", ["vllm", "scripted"])
def test_doctor_asks_where_vllm_is_the_engine(
    engine: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "dart_cli.doctor.examine.vllm_parts",
        lambda: iter([vllm_parts.check_compiler("no-such-cc")]),
    )
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\ndir = "{tmp_path}/run"\n[rollout]\nengine = "{engine}"\n')
    doctor(path)
    assert ("no-such-cc is not a program" in capsys.readouterr().out) == (engine == "vllm")
