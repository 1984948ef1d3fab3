"""Families of models: recognised by their folders, and never stronger than what the user sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bus.errors import ConfigError
from dart_cli.config.dry_run import describe
from dart_cli.config.families import (
    FAMILIES,
    PROMPTS,
    VALUES,
    origin_line,
    origins,
    recognise,
    values_of,
)
from dart_cli.config.load import config_of_model, load_config
from dart_cli.config.model_folder import screens_of
from dart_cli.config.rules import broken_rules
from dart_cli.config.rules.policy import POLICY
from dart_cli.config.schema import ACTION_PARSERS, Config, PolicyConfig
from dart_cli.doctor.run_checks import family

CLASSES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "opencua": "OpenCUAForConditionalGeneration",
}
"""Of which all checkpoints are, whatever their family."""
BOUNDS = {"ui-tars-1.5": (3136, 2_116_800), "scalecua": (3136, 2_109_744)}


def folder(
    path: Path, kind: str, *, name: str = "m", title: str = "", bounds: Any = None, base: str = ""
) -> Path:
    """The small files of a model folder that families are recognised by."""
    place = path / name
    place.mkdir(parents=True)
    config: dict[str, Any] = {"model_type": kind, "architectures": [CLASSES.get(kind, "Other")]}
    config |= {"_name_or_path": base} if base else {}
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if title:
        (place / "README.md").write_text(f"---\nlicense: mit\n---\n\n# {title}\n", encoding="utf-8")
    cut = {"patch_size": 16 if kind == "qwen3_vl" else 14, "merge_size": 2}
    least, most = bounds or (3136, 12_845_056)
    cut |= {"min_pixels": least, "max_pixels": most}
    (place / "preprocessor_config.json").write_text(json.dumps(cut), encoding="utf-8")
    return place


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("kind", "title", "name"),
    [
        ("qwen3_vl", "Qwen3-VL-8B-Instruct", "qwen3-vl"),
        ("qwen3_vl", "GUI-Owl-1.5-8B-Instruct", "gui-owl-1.5"),
        ("qwen3_vl", "MAI-UI: a foundation GUI agent", "mai-ui"),
        ("qwen3_vl", "UI-Venus-1.5-2B, made of Qwen3-VL", "ui-venus-1.5"),
        ("qwen3_vl", "UI-Venus-1.5-8B", "ui-venus-1.5"),
        ("qwen3_vl", "UI-Venus 1.5", "ui-venus-1.5"),
        ("qwen3_vl_moe", "UI-Venus-1.5-30B-A3B", "ui-venus-1.5"),
        ("qwen3_vl", "EvoCUA-8B, made of Qwen3-VL", "evocua"),
        ("qwen2_5_vl", "Qwen2.5-VL-7B-Instruct", "qwen2.5-vl"),
        ("qwen2_5_vl", "ScaleCUA-7B", "scalecua"),
        ("qwen2_5_vl", "UI-TARS-1.5 Model", "ui-tars-1.5"),
        ("qwen2_vl", "UI-TARS-7B-DPO", "ui-tars"),
        ("qwen2_vl", "UI-TARS-2B-SFT", "ui-tars"),
        ("opencua", "OpenCUA-Qwen2-7B", "opencua-qwen2"),
        ("opencua", "OpenCUA-32B", "opencua"),
        ("opencua", "EvoCUA-S1-72B", "evocua-s1"),
        ("glm4v_moe", "", "glm-4.5v"),
        ("qwen3_5", "Qwen3.5-9B", "qwen3.5"),
        ("qwen3_5", "Qwen3.6-27B", "qwen3.5"),
        ("qwen3_5", "Qwen3.8-27B", "qwen3.8"),
        ("qwen3_5", "Fara1.5-9B, made of Qwen3.5-9B", "fara-1.5"),
        ("qwen3_5", "UI-Venus-2-9B", "ui-venus-2"),
        ("qwen3_5", "Holo3.1-9B", "holo-3.1"),
        ("qwen3_5_moe", "Holo3-35B-A3B", "holo-3.1"),
        ("qwen3_5_moe", "Holo-3.1-35B-A3B", "holo-3.1"),
        ("qwen3_5_moe", "Qwen3.5-35B-A3B", "qwen3.5"),
        ("qwen3_vl_moe", "Qwen3-VL-30B-A3B-Instruct", "qwen3-vl"),
    ],
)
def test_a_folder_shows_its_family_by_its_card_or_its_name(
    tmp_path: Path, kind: str, title: str, name: str
) -> None:
    assert recognise(folder(tmp_path, kind, title=title)).name == name
    called = title.split(",", maxsplit=1)[0].split(":", maxsplit=1)[0].replace(" ", "-") or "any"
    found = recognise(folder(tmp_path, kind, name=called))
    assert found.name == name
    assert "folder's name alone" in found.why or "only family" in found.why


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_that_only_one_family_has_say_more_than_a_name(tmp_path: Path, name: str) -> None:
    place = folder(tmp_path, "qwen2_5_vl", name="Qwen2.5-VL-7B", bounds=BOUNDS[name])
    found = recognise(place)
    assert found.name == name
    assert str(BOUNDS[name][1]) in found.why


def test_what_a_checkpoint_was_made_of_is_not_its_family(tmp_path: Path) -> None:
    made_of = {"base": "Qwen/Qwen3-VL-8B-Instruct"}
    assert recognise(folder(tmp_path, "qwen3_vl", name="MAI-UI-8B", **made_of)).name == "mai-ui"
    with pytest.raises(ConfigError, match=r"qwen3-vl, gui-owl-1\.5, mai-ui, ui-venus-1\.5, evocua"):
        recognise(folder(tmp_path, "qwen3_vl", name="my-own", **made_of))


@pytest.mark.parametrize(
    ("kind", "title"),
    [
        ("qwen2_5_vl", "UI-Venus-Navi-7B"),
        ("qwen2_5_vl", "UI-Venus-Ground-72B"),
        ("qwen3_vl", "UI-Venus-2-9B"),
        ("qwen3_5", "UI-Venus-1.5-8B"),
    ],
)
def test_another_version_of_ui_venus_is_not_recognised(
    tmp_path: Path, kind: str, title: str
) -> None:
    for place in (folder(tmp_path, kind, title=title), folder(tmp_path, kind, name=title)):
        with pytest.raises(ConfigError, match=r"may be of .* name the family"):
            recognise(place)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "qwen3_vl",
            "may be of qwen3-vl, gui-owl-1.5, mai-ui, ui-venus-1.5, evocua, all of model_type qwen3_vl",
        ),
        ("qwen2_vl", "may be of ui-tars, all of model_type qwen2_vl"),
        (
            "qwen3_5",
            "may be of qwen3.5, qwen3.8, fara-1.5, ui-venus-2, holo-3.1, all of model_type qwen3_5",
        ),
    ],
)
def test_a_folder_that_does_not_show_its_family_is_one_line_with_the_cure(
    tmp_path: Path, kind: str, said: str
) -> None:
    place = folder(tmp_path, kind)
    with pytest.raises(ConfigError) as refusal:
        config_of_model(place, ["policy.family=auto"])
    text = str(refusal.value)
    assert text.startswith('policy.family = "auto"')
    assert said in text
    assert "name" in text
    assert "\n" not in text


def test_a_key_that_the_user_sets_wins_and_all_others_are_the_familys(tmp_path: Path) -> None:
    place = folder(tmp_path, "qwen3_vl", title="Qwen3-VL-4B-Instruct", bounds=(65_536, 2_000_000))
    path = written(
        tmp_path / "run.toml",
        f"[model]\npath = '{place}'\n[policy]\nfamily = 'auto'\nhistory_images = 2\nhistory_turns = 1\n",
    )
    config = load_config(path, ["policy.template=Do {instruction}"])
    policy = config.policy
    assert (policy.family, policy.action_parser, policy.coordinates) == (
        "qwen3-vl",
        "toolcall",
        "thousand",
    )
    assert (policy.history_images, policy.history_turns, policy.template) == (
        2,
        1,
        "Do {instruction}",
    )
    assert screens_of(config) == (32, 65_536, 2_000_000)
    assert policy.system_prompt == (PROMPTS / "qwen3-vl.system.txt").read_text(encoding="utf-8")
    assert list(broken_rules(POLICY, config)) == []
    shown = {each.key: origin_line(each) for each in origins(config)}
    assert list(shown) == list(VALUES)
    assert shown["history_images"] == "2 (set by you)"
    assert shown["action_parser"] == "'toolcall' (family qwen3-vl)"
    assert shown["system_prompt"].startswith("4051 characters, '# Tools You may")
    assert shown["system_prompt"].endswith("(family qwen3-vl: prompts/qwen3-vl.system.txt)")
    assert dict(describe(config, "rollout"))["policy.action_parser"] == shown["action_parser"]
    # What is saved with a run is whole: it needs neither the table nor the folder.
    saved = Config.model_validate_json(config.model_dump_json())
    assert saved.policy == policy


def test_without_a_family_nothing_changes(tmp_path: Path) -> None:
    place = folder(tmp_path, "qwen3_vl", title="Qwen3-VL-4B-Instruct")
    assert config_of_model(place).policy == PolicyConfig()
    builtin = load_config(written(tmp_path / "a.toml", "[policy]\nfamily = 'auto'\n"))
    assert builtin.policy.model_copy(update={"family": "none"}) == PolicyConfig()


def test_an_unknown_family_and_one_for_a_shipped_model_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.toml", "[policy]\nfamily = 'qwen3vl'\n[model]\npath = 'm'\n")
    with pytest.raises(ConfigError, match=r"policy\.family must be one of auto, none, .* did you mean 'qwen3-vl'"):  # fmt: skip
        load_config(path)
    path = written(tmp_path / "b.toml", "[policy]\nfamily = 'qwen3-vl'\n")
    with pytest.raises(
        ConfigError, match=r"is for folders, not for model\.path = \"builtin:tiny\""
    ):
        load_config(path)


def test_auto_without_the_folder_asks_for_a_name(tmp_path: Path) -> None:
    path = written(tmp_path / "a.toml", "[policy]\nfamily = 'auto'\n[model]\npath = 'no/such'\n")
    with pytest.raises(ConfigError, match=r"config\.json is missing.*name the family"):
        load_config(path)
    named = written(tmp_path / "b.toml", "[policy]\nfamily = 'mai-ui'\n[model]\npath = 'no/such'\n")
    assert load_config(named).policy.action_parser == "toolcall-mai"


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_whole(name: str, tmp_path: Path) -> None:
    its = FAMILIES[name]
    values = {key: value for key, (value, _) in values_of(name).items()}
    assert set(values) == set(VALUES)
    assert its.action_parser in ACTION_PARSERS
    assert (values["template"] + values["system_prompt"]).count("{instruction}") == 1
    assert ("{previous}" in values["template"]) == (its.history_turns < 1000)
    assert its.later_screen.count("{screen}") == 1
    assert its.past_screen.count("{screen}") == (its.past_screen != "")
    config = Config.model_validate(
        {"policy": {"family": name, **values}, "model": {"path": str(tmp_path)}}
    )
    assert list(broken_rules(POLICY, config)) == []


def test_every_prompt_is_of_a_family() -> None:
    used = {
        f"{stem}.{kind}.txt"
        for name, its in FAMILIES.items()
        for kind, stem in (
            ("system", its.system or its.prompt or name),
            ("template", its.prompt or name),
        )
    }
    assert {path.name for path in PROMPTS.glob("*.txt")} <= used


def test_the_doctor_tells_the_family_of_a_folder_and_what_follows(tmp_path: Path) -> None:
    place = folder(tmp_path, "qwen3_vl", title="GUI-Owl-1.5-8B")
    found = list(family(config_of_model(place), of_model=True))
    assert found[0].subject == "family"
    assert found[0].text.startswith(
        "gui-owl-1.5: GUI-Owl-1.5 (Mobile-Agent-v3.5); the folder shows it"
    )
    assert {each.subject for each in found[1:]} == {f"policy.{key}" for key in VALUES}
    assert list(family(config_of_model(place))) == [], "a run that names no family has none"
    [unknown] = family(config_of_model(folder(tmp_path, "qwen3_vl", name="own")), of_model=True)
    assert (unknown.level, "may be of qwen3-vl" in unknown.text) == ("warning", True)
    other = config_of_model(place, ["policy.family=mai-ui"])
    assert any(
        "shows gui-owl-1.5" in each.text and each.level == "warning" for each in family(other)
    )
    glm = config_of_model(folder(tmp_path, "glm4v_moe", name="glm"), ["policy.family=auto"])
    assert any("action parser and prompt only" in each.text for each in family(glm))


@pytest.mark.parametrize("date", ["2026-02-30", "20260101", "1.2.2026", ""])
def test_a_date_that_is_no_day_is_refused_in_one_line(date: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.toml", f"[policy]\ndate = '{date}'\n")
    with pytest.raises(ConfigError, match=r"policy\.date must be a date as YYYY-MM-DD") as refusal:
        load_config(path)
    assert "\n" not in str(refusal.value)


def test_the_instruction_is_in_the_template_or_in_the_system_message() -> None:
    def problems(**keys: str) -> list[str]:
        config = Config.model_validate({"policy": keys})
        return [str(each) for each in broken_rules(POLICY, config)]

    assert problems(template="", system_prompt="Do {instruction}") == []
    [problem] = problems(template="Do it", system_prompt="Be brief")
    assert "needs {instruction} where the task belongs" in problem
