"""This host is checked for what a run needs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from dart_cli.config.rules import Finding
from dart_cli.config.schema import Config
from dart_cli.doctor import machine
from dart_cli.doctor import run_checks as run
from tests.doctor.parts import worst

GIB = 2**30
CPU: dict[str, object] = {"version": "2.13.0+cpu", "cuda": None, "gpus": 0}
CUDA: dict[str, object] = {"version": "2.13.0", "cuda": "12.8", "gpus": 0}


@pytest.mark.parametrize(
    ("listed", "torch", "visible", "asking", "level", "part"),
    [
        ([], CPU, None, "", "ok", "none: the tiny model needs none"),
        (
            [],
            CPU,
            None,
            "train.device = 'cuda'",
            "error",
            "none, and the run asks for some: train.device = 'cuda'",
        ),
        (
            ["H200, 141 GiB"],
            CPU,
            None,
            "",
            "warning",
            "pip install --force-reinstall torch==2.13.0`",
        ),
        (["H200, 141 GiB"], CPU, None, "train.device = 'cuda'", "error", "install the CUDA build"),
        (["H200, 141 GiB"], CUDA, None, "train.device = 'cuda'", "error", "the driver is older"),
        (["H200, 141 GiB"], CUDA, "", "train.device = 'cuda'", "error", "unset it"),
        (
            ["H200, 141 GiB"],
            CUDA | {"gpus": 1},
            "0",
            "train.device = 'cuda'",
            "ok",
            "torch sees 1 of 1",
        ),
        (
            ["H200"] * 4,
            CUDA | {"gpus": 2},
            "0,1",
            "train.device = 'cuda'",
            "ok",
            "torch sees 2 of 4",
        ),
        (
            ["H200"] * 4,
            CUDA | {"gpus": 1},
            "GPU-a,GPU-x",
            "train.device = 'cuda'",
            "error",
            "lists 2 GPUs, torch sees 1",
        ),
        (["H200"] * 4, CUDA | {"gpus": 1}, "0,9", "", "warning", "CUDA stops at the first"),
        (
            ["H200"] * 4,
            CUDA | {"gpus": 1},
            "MIG-a,MIG-b",
            "train.device = 'cuda'",
            "ok",
            "torch sees 1 of 4",
        ),
        ([], "exit code 1: no module", None, "", "error", "scripts/setup"),
    ],
)
def test_gpus_are_those_that_torch_sees(
    listed: list[str], torch: Any, visible: str | None, asking: str, level: str, part: str
) -> None:
    result = worst(list(machine.check_gpus(listed, torch, visible, asking)))
    assert result.level == level
    findings = list(machine.check_gpus(listed, torch, visible, asking))
    assert any(part in f"{each.text} {each.cure}" for each in findings)


@pytest.mark.parametrize(
    ("channel", "engine", "modes", "levels"),
    [
        ("nccl", "vllm", "0, Default\n1, Default\n", ["ok"]),
        (
            "nccl",
            "vllm",
            "0, Default\n1, Exclusive_Process\n7, Exclusive_Process\n",
            ["ok", "error"],
        ),
        ("nccl", "transformers", "0, Exclusive_Process\n", ["ok"]),
        ("nccl", "transformers", "0, Prohibited\n", ["error"]),
        ("nccl", "vllm", "exit 9", ["warning"]),
        ("gloo", "vllm", "0, Exclusive_Process\n", []),
    ],
)
def test_a_gpu_that_allows_one_process_is_an_error_where_a_worker_has_two(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    channel: str,
    engine: str,
    modes: str,
    levels: list[str],
) -> None:
    program = tmp_path / "nvidia-smi"
    lines = modes if modes.startswith("exit") else f"echo '{modes.strip()}'"
    program.write_text(
        f'#!/bin/sh\n[ "$*" = "--query-gpu=index,compute_mode --format=csv,noheader" ] || exit 1\n{lines}\n'
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    config = Config.model_validate({"rollout": {"engine": engine}, "weights": {"channel": channel}})
    findings = list(machine.compute_modes(config))
    assert [each.level for each in findings] == levels
    if levels == ["ok", "error"]:
        assert findings[1].text.startswith(
            "GPU 1, 7: compute mode Exclusive_Process allows one process"
        )
        assert 'weights.channel = "gloo" or "file"' in findings[1].cure


@pytest.mark.parametrize(
    ("version", "cure"),
    [(None, "is not installed"), ("1.9", "1.9, want >=2.0"), ("2.0", ""), ("2.1rc1", "")],
)
def test_a_package_is_there_within_its_bounds(version: str | None, cure: str) -> None:
    findings = list(machine.check_package(Requirement("numpy>=2.0"), version))
    assert bool(findings) == bool(cure)
    assert all(cure in each.text and each.cure == "pip install 'numpy>=2.0'" for each in findings)


@pytest.mark.parametrize(
    ("judge", "level"),
    [
        (lambda: machine.check_shared(64 * 2**20), "warning"),
        (lambda: machine.check_shared(8 * GIB), "ok"),
        (lambda: machine.check_files(100, 100), "error"),
        (lambda: machine.check_files(1024, 1 << 20), "warning"),
        (lambda: machine.check_files(1024, 1024), "warning"),
        (lambda: machine.check_files(-1, -1), "ok"),
        (lambda: machine.check_files(4096, 4096), "ok"),
        (lambda: run.check_room(GIB, 50, Path("/x")), "error"),
        (lambda: run.check_room(10 * GIB, 50, Path("/x")), "warning"),
        (lambda: run.check_room(60 * GIB, 50, Path("/x")), "ok"),
    ],
)
def test_limits_are_judged(judge: Callable[[], Finding], level: str) -> None:
    result = judge()
    assert result.level == level
    assert bool(result.cure) == (level != "ok")


def test_a_program_is_an_error_where_the_suite_plays_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(machine.PROGRAMS, "Chromium", (("chromium",), "miniwob", "install it"))
    assert {each.level for each in machine.programs("mini")} == {"ok"}
    for suite, program in (("miniwob", "Chromium"), ("desktop", "Xvfb"), ("osworld", "Docker")):
        result = worst(list(machine.programs(suite)))
        assert (result.subject, result.level) == (program, "error")
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho no daemon >&2\nexit 1\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    result = worst([each for each in machine.programs("osworld") if each.subject == "Docker"])
    assert result.level == "error"
    assert "its daemon does not answer: exit code 1: no daemon" in result.text


def test_another_program_is_given_a_deadline() -> None:
    answer, fault = machine.run_program([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    assert answer == ""
    assert "gave no answer in 0 s" in fault
    assert machine.run_program(["no-such-program-here"])[1].startswith(
        "no-such-program-here: No such file"
    )
