"""What an evaluation's episodes depend on: whatever changes it begins another evaluation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dart_cli.config.schema import Config
from dart_cli.evaluation import settings
from dart_cli.evaluation.results import differences
from dart_cli.evaluation.settings import settings_of
from dart_cli.weights.folder import folder_digest
from envs.contract.base import Task
from tests.config.model_parts import change_json, write_json, write_model

DOCS = Path(__file__).parents[2] / "docs"


def told(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> str:
    """The digest of a suite of one task."""
    given: dict[str, Any] = {"id": "a/b", "suite": "a", "instruction": "do it", "max_steps": 5}
    suite = SimpleNamespace(tasks={"a/b": Task(**given | changes)})
    monkeypatch.setattr(settings, "load_suite", lambda _: suite)
    return settings_of(Config(), None, with_model=False).suite_digest


def test_a_tasks_file_is_part_of_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [
        told(monkeypatch),
        told(monkeypatch, instruction="do that"),
        told(monkeypatch, max_steps=6),
        told(monkeypatch, feasible=False),
        told(monkeypatch, evaluated=False),
        told(monkeypatch, params={"evaluator": {"func": "exact_match"}}),
        told(monkeypatch, params={"evaluator": {"func": "fuzzy_match"}}),
        told(monkeypatch, params={"evaluator": {"func": "exact_match"}, "config": [Path("a")]}),
    ]
    assert len(set(digests)) == len(digests)
    assert told(monkeypatch, tier=3) == told(monkeypatch)


def test_parameters_of_own_suites_may_have_any_keys_and_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walls = [{"walls": [{(0, 1): end, 2: object(), "a": {3}}]} for end in ("open", "shut")]
    one, other = (told(monkeypatch, params=each) for each in walls)
    assert one != other


def test_options_of_vllm_are_settings_where_it_answers() -> None:
    def values(engine: str, options: dict[str, str]) -> Any:
        given = {"rollout": {"engine": engine}, "vllm": {"options": options}}
        return settings_of(Config.model_validate(given), None, with_model=False)

    one, other = (values("vllm", options) for options in ({}, {"quantization": "fp8"}))
    assert [key for key, *_ in differences(one, other)] == ["vllm.options"]
    same = [values("transformers", options) for options in ({}, {"quantization": "fp8"})]
    assert not list(differences(*same))


def test_own_code_is_part_of_what_it_names(tmp_path: Path) -> None:
    """Another way of reading texts, or of judging, begins another evaluation."""
    suite, action_parser = tmp_path / "own_suite.py", tmp_path / "own_parser.py"
    suite.write_text(
        "from envs.suites.embedded.suites import MiniSuite\n\nclass Own(MiniSuite):\n    name = 'own'\n"
    )
    action_parser.write_bytes((DOCS / "examples" / "json_parser.py").read_bytes())
    names = {
        "env": {"suite": f"{suite}:Own"},
        "policy": {"action_parser": f"{action_parser}:JsonParser"},
    }
    config = Config.model_validate(names)

    def changed(path: Path) -> list[str]:
        before = settings_of(config, None, with_model=False)
        path.write_text(f"{path.read_text()}# changed\n")
        after = settings_of(config, None, with_model=False)
        return [key for key, *_ in differences(before, after)]

    assert changed(suite) == ["suite"]
    assert changed(action_parser) == ["policy.action_parser"]
    shipped = settings_of(Config(), None, with_model=False)
    assert shipped.values["policy.action_parser"] == "compact"


def test_what_the_folder_of_a_judge_holds_is_a_setting(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    config = Config.model_validate({"env": {"judge": {"model": str(folder)}}})
    before = settings_of(config, None, with_model=False)
    write_json(folder, "generation_config.json", {"eos_token_id": 7})
    after = settings_of(config, None, with_model=False)
    assert [key for key, *_ in differences(before, after)] == ["env.judge.folder"]
    served = Config.model_validate({"env": {"judge": {"model": "eyes", "url": "http://a/v1"}}})
    assert "env.judge.folder" not in settings_of(served, None, with_model=False).values


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", {"rope_theta": 2.0}),
        ("tokenizer_config.json", {"chat_template": "{{ messages[0] }}"}),
        ("generation_config.json", {"eos_token_id": [1, 2]}),
        ("preprocessor_config.json", {"max_pixels": 56 * 56}),
        ("verifier.json", {"reach": 9}),
    ],
)
def test_every_file_that_answers_depend_on_is_in_a_models_digest(
    name: str, change: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_model(tmp_path)
    if not (folder / name).is_file():
        (folder / name).write_text("{}")
    before = folder_digest(folder)
    change_json(folder, name, **change)
    assert folder_digest(folder) != before
