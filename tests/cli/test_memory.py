"""A model that does not fit into the memory is one line with a cure, whichever verb loads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bus.errors import DartError, UserError
from dart_cli.cli.main import main
from dart_cli.config.schema import Config
from dart_cli.engines import batch
from dart_cli.engines.transformers_engine import TransformersEngine
from dart_cli.policy import model_files
from dart_cli.policy.loader import load_policy
from dart_cli.train.trained_policy import TrainModel
from scripts.make_grounding_set import make_set

TEXT = (
    "CUDA out of memory. Tried to allocate 130.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 61.88 MiB "
    "is free.\nSee documentation for Memory Management"
)
ON_A_CPU = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
OF_CUDA = "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the documentation"
"""Where the GPU is so full that it has no room for a context."""


def refused(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError(TEXT)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """No module can be moved to a device."""
    monkeypatch.setattr(torch.nn.Module, "to", refused)


@pytest.fixture
def verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """verb(*arguments) -> its exit code and what it writes; CONFIG and DATA are a run's file, and a set."""
    path, data = tmp_path / "c.toml", tmp_path / "sets"
    path.write_text(f'[run]\ndir = "{tmp_path}/run"\n[rollout]\nmax_tokens = 8\n')

    def run(*arguments: str) -> tuple[int, str, str]:
        if "DATA" in arguments:
            make_set(data, ["mini"], {"train": 3})
        named = {"CONFIG": str(path), "DATA": str(data / "train"), "OUT": str(tmp_path / "out")}
        with pytest.raises(SystemExit) as exit_:
            main([named.get(each, each) for each in arguments])
        return int(exit_.value.code or 0), *capsys.readouterr()

    return run


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "CONFIG", "--mode", "greedy", "--episodes", "1", "--tasks", "mini/click"),
        ("tune", "--data", "DATA", "--model", "builtin:tiny", "--out", "OUT"),
        ("data", "collect", "CONFIG", "--from", "policy", "--per-task", "1", "--out", "OUT"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_verb_that_loads_a_model_which_does_not_fit_is_one_line(
    verb: Callable[..., tuple[int, str, str]], arguments: tuple[str, ...]
) -> None:
    code, _, told = verb(*arguments)
    assert code == DartError.exit_code
    [line] = [each for each in told.splitlines() if each.startswith("error: ")]
    assert "builtin:tiny does not fit into the memory of cpu (CUDA out of memory. Tried" in line
    assert "end what else uses it" in line
    assert "Traceback" not in told


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(("option", "subject"), [("--parity", "parity"), ("--play", "episode")])
def test_doctor_names_what_does_not_fit_and_the_cure(
    verb: Callable[..., tuple[int, str, str]], option: str, subject: str
) -> None:
    code, told, _ = verb("doctor", "CONFIG", option, "--json")
    [finding] = [each for each in json.loads(told)["findings"] if each["subject"] == subject]
    assert (code, finding["level"]) == (1, "error")
    assert "does not fit into the memory of cpu" in finding["text"]
    assert "model.dtype" in finding["cure"]


def test_doctor_names_a_comparison_that_does_not_fit(
    verb: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dart_cli.train.logprob_check.rescore_part", refused)
    _, told, _ = verb("doctor", "CONFIG", "--parity", "--json")
    [finding] = [each for each in json.loads(told)["findings"] if each["subject"] == "parity"]
    assert "the trainer's forward pass does not fit" in finding["text"]
    assert "train.pack_tokens" in finding["cure"]


def test_what_a_model_computes_out_of_memory_ends_in_one_line_too(
    verb: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dart_cli.tune.tuning.train_stages", refused)
    code, _, told = verb("tune", "--data", "DATA", "--model", "builtin:tiny", "--out", "OUT")
    assert code == 1
    assert "error: out of memory: CUDA out of memory. Tried to allocate 130.00 MiB" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_that_does_not_fit_names_what_spreads_it_and_is_started_again(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Another process may hold the memory that it lacks, so it is not the user's mistake."""
    monkeypatch.setattr(torch.nn.Module, "to", refused)
    monkeypatch.setattr(model_files, "_load_parameter", refused)
    config = Config.model_validate({"model": {"dtype": dtype}})
    with pytest.raises(DartError, match="does not fit into the memory of cpu") as raised:
        TrainModel.load(config)
    assert not isinstance(raised.value, UserError)
    assert ("train.ranks" in str(raised.value)) == (dtype == "bfloat16")


def test_an_engine_whose_cache_does_not_fit_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "PrefixCache", refused)
    with pytest.raises(DartError, match="cache of keys and values does not fit"):
        TransformersEngine(load_policy("builtin:tiny"))


@pytest.mark.parametrize("text", [ON_A_CPU, OF_CUDA])
def test_memory_that_is_refused_is_not_taken_for_a_broken_file(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr("dart_cli.policy.loader.AutoModelForImageTextToText.from_pretrained", read)
    with pytest.raises(DartError, match="does not fit into the memory of cpu"):
        load_policy("builtin:tiny")
