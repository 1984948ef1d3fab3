"""The doctor examines a model folder whole: its files, its shapes, on request its values."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dart_cli.config.model_tensors import read_tensors
from dart_cli.doctor.run import unusable
from tests.config.model_parts import Entry, write_model, write_tensors, zeros
from tests.config.test_model_folders import SPOILT
from tests.doctor.parts import doctor


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host is not examined again for each folder."""
    for name in ("gpus", "programs", "packages"):
        monkeypatch.setattr(f"dart_cli.doctor.machine.{name}", lambda *_, **__: [])


def of_model(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, Any]:
    """(exit code, the findings about the model by subject)."""
    code = doctor(folder, "--json", *more)
    found = json.loads(capsys.readouterr().out)["findings"]
    return code, {each["subject"]: each for each in found}


@pytest.mark.parametrize(
    ("spoil", "told"), [each[1:] for each in SPOILT], ids=[each[0] for each in SPOILT]
)
def test_a_folder_that_cannot_work_is_an_error(
    spoil: Callable[[Path], None], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "model")
    spoil(folder)
    code, found = of_model(folder, capsys)
    assert code == 1
    assert found["model"]["level"] == "error"
    assert told in found["model"]["text"] + "; " + found["model"]["cure"]


def test_a_whole_folder_is_in_order_and_its_values_are_read_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "model")
    code, found = of_model(folder, capsys)
    assert (code, "values" in found) == (0, False)
    code, found = of_model(folder, capsys, "--values")
    assert code == 0
    assert found["values"]["text"].startswith("all of ")


NAN = {
    "F32": struct.pack("<f", float("nan")),
    "F16": struct.pack("<e", float("inf")),
    "BF16": struct.pack("<f", float("-inf"))[2:],
    "F64": struct.pack("<d", float("nan")),
}
LARGEST = {
    "F32": b"\xff\xff\x7f\x7f",
    "F16": b"\xff\x7b",
    "BF16": b"\x7f\x7f",
    "F64": b"\xff" * 6 + b"\xef\x7f",
}


@pytest.mark.parametrize("dtype", list(NAN))
def test_a_value_that_is_no_number_is_counted(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dart_cli.doctor.run.CHUNK", 16)
    good, bad = LARGEST[dtype], NAN[dtype]
    entries: dict[str, Entry] = {
        "fine": (dtype, (40,), 40 * good),
        "spoilt": (dtype, (41,), 20 * good + bad + 19 * good + bad),
        "whole": ("I64", (1,), b"\xff" * 8),
    }
    write_tensors(tmp_path / "model.safetensors", entries)
    found = {name: unusable(tensor) for name, tensor in read_tensors(tmp_path).items()}
    assert found == {"fine": 0, "spoilt": 2, "whole": 0}


def test_a_nan_is_named_with_its_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "model")
    tensors = zeros(json.loads((folder / "config.json").read_text()))
    name = "language_model.norm.weight"
    dtype, shape, data = tensors[name]
    tensors[name] = (dtype, shape, NAN["F32"] + data[4:])
    write_tensors(folder / "model.safetensors", tensors)
    code, found = of_model(folder, capsys, "--values")
    assert code == 1
    assert f"the first is {name} in" in found["values"]["text"]


def test_values_need_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor("--values") == 2
    assert "--values needs to know what" in capsys.readouterr().err
