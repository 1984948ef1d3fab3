"""The doctor examines a model folder whole: its files, its shapes, on request its values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from scripts.small_models import build
from tests.config.model_parts import write_model
from tests.config.test_model_folders import SPOILT
from tests.doctor.parts import doctor


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host is not examined again for each folder."""
    for name in ("gpus", "programs", "packages"):
        monkeypatch.setattr(f"dart_cli.doctor.machine.{name}", lambda *_, **__: [])


def of_model(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, Any]:
    """Return (exit code, findings about the model by subject)."""
    code = doctor(folder, "--json", *more)
    result = json.loads(capsys.readouterr().out)["findings"]
    return code, {each["subject"]: each for each in result}


@pytest.mark.parametrize(
    ("spoil", "told"), [each[1:] for each in SPOILT], ids=[each[0] for each in SPOILT]
)
def test_a_folder_that_cannot_work_is_an_error(
    spoil: Callable[[Path], None], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "model")
    spoil(folder)
    code, finding = of_model(folder, capsys)
    assert code == 1
    assert finding["model"]["level"] == "error"
    assert told in finding["model"]["text"] + "; " + finding["model"]["cure"]


def test_a_whole_folder_is_in_order_and_its_values_are_read_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build("qwen2_5_vl", tmp_path / "model")
    code, finding = of_model(folder, capsys)
    assert (code, "values" in finding) == (0, False)
    code, finding = of_model(folder, capsys, "--values")
    assert code == 0
    assert finding["values"]["text"].startswith("all of ")


def test_a_nan_is_named_with_its_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = build("qwen2_5_vl", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    code, finding = of_model(folder, capsys, "--values")
    assert code == 1
    assert "language_model.norm.weight (1 numbers)" in finding["values"]["text"]


def test_values_need_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--values") == 2
    assert "--values needs a run; add its TOML file" in capsys.readouterr().err
