"""A folder of a class that dart does not load is one line that names the class, the classes that dart loads and
the page with the reasons, whichever command is asked, before anything starts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dart_cli.cli.main import main
from dart_cli.config.architecture import MODEL_TYPES
from dart_cli.config.families import FAMILIES
from dart_cli.config.model_folder import CLASSES_CURE, EXAMPLES, class_problem
from scripts.make_grounding_set import make_set
from tests.config.model_parts import write_json, write_model

PAGE = "docs/policy.md#classes-that-we-do-not-take"
TABLE = Path(__file__).parents[2] / "docs" / "policy.md"

SEEING: dict[str, dict[str, Any]] = {
    "gemma3": {
        "mm_tokens_per_image": 256,
        "image_token_index": 262144,
        "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "sliding_window": 1024},
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14},
    },
    "gemma4": {
        "image_token_id": 258880,
        "text_config": {"model_type": "gemma4_text", "hidden_size": 2304, "sliding_window": 512},
        "vision_config": {"model_type": "gemma4_vision", "pooling_kernel_size": 3},
        "audio_config": None,
    },
    "internvl": {
        "downsample_ratio": 0.5,
        "image_seq_length": 256,
        "image_token_id": 151667,
        "text_config": {"model_type": "qwen2", "hidden_size": 896},
        "vision_config": {"model_type": "internvl_vision", "image_size": [448, 448]},
    },
    "glm46v": {
        "image_token_id": 151363,
        "text_config": {"model_type": "glm4v_text", "hidden_size": 4096},
        "vision_config": {"model_type": "glm4v_vision", "patch_size": 14},
    },
    "lfm2_vl": {
        "downsample_factor": 2,
        "image_token_id": 396,
        "text_config": {"model_type": "lfm2", "hidden_size": 1024, "conv_L_cache": 3},
        "vision_config": {"model_type": "siglip2_vision_model", "patch_size": 16},
    },
    "smolvlm": {
        "scale_factor": 4,
        "image_token_id": 49190,
        "text_config": {"model_type": "llama", "hidden_size": 576},
        "vision_config": {"model_type": "smolvlm_vision", "image_size": 512, "patch_size": 16},
    },
    "minicpmv4_6": {
        "insert_layer_id": 6,
        "image_token_id": 248056,
        "text_config": {"model_type": "qwen3_5_text", "hidden_size": 1024},
        "vision_config": {"model_type": "minicpmv4_6_vision", "image_size": 980},
    },
    "mistral3": {
        "spatial_merge_size": 2,
        "image_token_index": 10,
        "text_config": {"model_type": "mistral", "hidden_size": 5120},
        "vision_config": {"model_type": "pixtral", "image_size": 1540, "patch_size": 14},
    },
}
"""Keys from the config.json of published checkpoints, of classes that the table of docs/policy.md has."""

HINTS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {"hidden_size": 2560, "num_hidden_layers": 36}, "it has no vision tower"),
    ("llama", {"hidden_size": 4096, "rope_theta": 5e5}, "it has no vision tower"),
    # Text configurations of this class had keys of images (transformers 4.52).
    ("qwen2_5_vl_text", {"hidden_size": 64, "vision_start_token_id": 3}, "it has no vision tower"),
    ("qwen2_vl", {"text_config": {"hidden_size": 64}}, "without a vision_config"),
    (
        "opencua",
        {
            "auto_map": {"AutoModel": "modeling_opencua.OpenCUAForConditionalGeneration"},
            "vision_config": {"model_type": "qwen2_5_vl"},
        },
        "it is Python code in its folder (auto_map), which is never run",
    ),
    (
        "internvl_chat",
        {"auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"}},
        "(auto_map), which is never run",
    ),
    ("qwen9_vl", {"transformers_version": "9.1.0", "vision_config": {}}, "does not load; take"),
    ("", {"_class_name": "AutoencoderKL"}, "model_type is missing"),
]
"""`model_type`, keys of config.json, and what the line says of it."""


@pytest.mark.parametrize("kind", SEEING)
def test_the_line_names_the_class_the_classes_that_load_and_the_page(kind: str) -> None:
    line = class_problem(Path("m"), {"model_type": kind, **SEEING[kind]})
    assert line == f"m/config.json: model_type is {kind}, which dart does not load; {CLASSES_CURE}"
    assert len(line) < 400
    assert PAGE in line
    for known in MODEL_TYPES:
        assert f"{known} ({EXAMPLES[known]})" in line


@pytest.mark.parametrize("kind", SEEING)
def test_what_the_tests_call_a_class_is_one(kind: str) -> None:
    from transformers import CONFIG_MAPPING  # late: a second

    if kind not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have the class yet")
    config = CONFIG_MAPPING[kind](**SEEING[kind])
    assert config.model_type == kind
    for part in ("text_config", "vision_config"):
        own = SEEING[kind][part]
        assert {key: getattr(getattr(config, part), key) for key in own} == own


@pytest.mark.parametrize(("kind", "keys", "hint"), HINTS, ids=[each[0] for each in HINTS])
def test_a_near_miss_says_what_it_lacks(kind: str, keys: dict[str, Any], hint: str) -> None:
    line = class_problem(Path("m"), {"model_type": kind, **keys} if kind else keys)
    assert hint in line
    assert line.endswith(f"; {CLASSES_CURE}")
    assert line.partition("; ")[2] == CLASSES_CURE  # the fix of a finding


def test_examples_are_of_the_class() -> None:
    assert set(MODEL_TYPES) <= EXAMPLES.keys()
    for kind in MODEL_TYPES:
        patterns = [
            family.name_pattern
            for family in FAMILIES.values()
            if kind in family.model_types and family.name_pattern
        ]
        assert patterns, kind
        assert re.search("|".join(patterns), EXAMPLES[kind], re.IGNORECASE), kind


def test_the_page_has_the_reasons() -> None:
    _, _, section = TABLE.read_text(encoding="utf-8").partition("\n## Classes that we do not take")
    section = section.partition("\n## ")[0]
    for kind in SEEING:
        assert f"| `{kind}`" in section


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    """A whole folder of Gemma 4 with a tokenizer, a preprocessor and weights."""
    folder = write_model(tmp_path / "gemma-4")
    write_json(folder, "config.json", {"model_type": "gemma4", **SEEING["gemma4"]})
    return folder


TOML = '[model]\npath = "{model}"\n[run]\ndir = "{run}"\n'
OWN = '[policy]\naction_parser = "uitars"\ncoordinates = "thousand"\n'
AUTO = '[policy]\nfamily = "auto"\n'

COMMANDS: list[tuple[str, Callable[[str, str, str], list[str]]]] = [
    ("up", lambda toml, _model, _out: ["up", toml]),
    ("dry run", lambda toml, _model, _out: ["up", toml, "--dry-run"]),
    ("vllm", lambda toml, _model, _out: ["up", toml, "--set", 'rollout.engine="vllm"']),
    ("smoke test", lambda toml, _model, _out: ["up", toml, "--smoke-test"]),
    ("doctor's smoke test", lambda toml, _model, _out: ["doctor", toml, "--smoke-test"]),
    ("rollout", lambda toml, _model, _out: ["rollout", toml]),
    ("train", lambda toml, _model, _out: ["train", toml]),
    ("eval", lambda toml, _model, _out: ["eval", toml]),
    ("eval --model", lambda toml, model, _out: ["eval", toml, "--model", model]),
    ("serve", lambda _toml, model, _out: ["serve", "--model", model]),
    ("tune", lambda toml, model, out: ["tune", "--data", toml, "--model", model, "--out", out]),
    ("add-pointer", lambda _toml, model, out: ["model", "add-pointer", model, out]),
]


@pytest.mark.parametrize(("name", "words"), COMMANDS, ids=[each[0] for each in COMMANDS])
@pytest.mark.parametrize("policy", [OWN, AUTO], ids=["own", "auto"])
def test_each_command_says_it_in_one_line(
    name: str,
    words: Callable[[str, str, str], list[str]],
    policy: str,
    gemma: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    toml, run, out = tmp_path / "c.toml", tmp_path / "run", tmp_path / "out"
    toml.write_text(TOML.format(model=gemma, run=run) + policy)
    with pytest.raises(SystemExit) as exit_:
        main(words(str(toml), str(gemma), str(out)))
    printed, error = capsys.readouterr()
    assert (exit_.value.code, printed, error.count("\n")) == (2, "", 1), name
    assert error.startswith("error: ")
    assert error.count("model_type is gemma4, which dart does not load") == 1
    assert CLASSES_CURE in error
    assert not run.exists()
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model-Q4_K_M.gguf", "GGUF", "has weights in the format GGUF"),
        ("adapter_config.json", '{"base_model_name_or_path": "Base-7B"}', "of the model Base-7B;"),
    ],
)
def test_a_folder_of_another_format_has_no_family_either(
    name: str, content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, toml = tmp_path / "m", tmp_path / "c.toml"
    folder.mkdir()
    (folder / name).write_text(content)
    toml.write_text(TOML.format(model=folder, run=tmp_path / "run") + AUTO)
    with pytest.raises(SystemExit) as exit_:
        main(["up", str(toml)])
    error = capsys.readouterr().err
    assert (exit_.value.code, error.count("\n")) == (2, 1)
    assert words in error
    assert "name the family" not in error


def test_a_grounding_set_says_it_too(
    gemma: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_set(tmp_path / "set", ["mini"], {"test": 2})
    with pytest.raises(SystemExit) as exit_:
        main(["eval", "grounding", str(tmp_path / "set" / "test"), "--model", str(gemma)])
    printed, error = capsys.readouterr()
    assert (exit_.value.code, printed, error.count("\n")) == (2, "", 1)
    assert "model_type is gemma4, which dart does not load" in error


def test_doctor_says_it_once_and_goes_on(gemma: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["doctor", str(gemma), "--parity"])
    printed = capsys.readouterr().out
    assert exit_.value.code == 1
    assert printed.count("model_type is gemma4, which dart does not load") == 1
    assert printed.count(PAGE) == 1
    assert "1 thing must be fixed first" in printed
