"""A model folder that cannot work is refused in words of its own: what its files show before anything starts,
the rest when it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bus.errors import ModelError
from dart_cli.cli.main import main
from dart_cli.config.architecture import shape_of
from dart_cli.config.model_folder import (
    check_folder,
    is_model_folder,
    model_problem,
    read_json,
    weight_files,
)
from dart_cli.policy.loader import check_weights, load_policy
from scripts.small_models import build
from tests.config.model_parts import change_json, write_json, write_model, write_tensors, zeros

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def _drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def _lost_shard(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    write_json(folder, INDEX, {"weight_map": {"a": "model-00001-of-00002.safetensors"}})


def _loop(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("tokenizer.json")


def _adapters(folder: Path) -> None:
    write_json(folder, "adapter_config.json", {"base_model_name_or_path": "Base-7B", "r": 32})


def _adapters_alone(folder: Path) -> None:
    (folder / "config.json").unlink()
    _adapters(folder)


def _gguf(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "config.json").unlink()
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")


SPOILT: list[tuple[str, Callable[[Path], None], str]] = [
    ("gpt2", lambda f: write_json(f, "config.json", {"model_type": "gpt2"}), "model_type is gpt2"),
    ("no type", lambda f: write_json(f, "config.json", {}), "model_type is missing"),
    ("config broken", lambda f: (f / "config.json").write_text("{") and None, "is not JSON"),
    ("pickle only", _pickled, "never unpickled"),
    ("no weights", _drop(WEIGHTS), "fetch the weights with `hf download REPO"),
    ("no weights, but a plan", _drop(WEIGHTS), "for a plan alone, `dart doctor CONFIG`"),
    (
        "adapters alone",
        _adapters_alone,
        "has LoRA adapters (adapter_config.json) of the model Base-7B",
    ),
    ("adapters beside a model", _adapters, "has LoRA adapters (adapter_config.json)"),
    ("GGUF", _gguf, "has weights in the format GGUF, which cannot be trained; fetch the safeten"),
    (
        "no vision tower",
        lambda f: change_json(f, "config.json", vision_config=None),
        "model_type is qwen2_5_vl, which dart does not load without a vision_config",
    ),
    ("no tokenizer", _drop("tokenizer.json"), "tokenizer.json is missing"),
    ("a loop of links", _loop, "tokenizer.json is missing"),
    ("no preprocessor", _drop("preprocessor_config.json"), "preprocessor_config.json is missing"),
    (
        "pixels that are none",
        lambda f: change_json(f, "preprocessor_config.json", min_pixels="few"),
        "no whole numbers",
    ),
    (
        "a preprocessor of squares",
        lambda f: change_json(f, "preprocessor_config.json", size=224),
        "size must have shortest_edge and longest_edge, got '224'",
    ),
    ("no template", _drop("tokenizer_config.json"), "no chat template"),
    ("lost shard", _lost_shard, "model-00001-of-00002.safetensors is missing"),
    (
        "quantised",
        lambda f: change_json(f, "config.json", quantization_config={"quant_method": "awq"}),
        "quantised weights cannot be trained",
    ),
    (
        "quantised for MLX",
        lambda f: change_json(f, "config.json", quantization={"group_size": 64, "bits": 4}),
        "has a quantization (unnamed): quantised weights cannot be trained",
    ),
]


@pytest.mark.parametrize(
    ("spoil", "told"), [each[1:] for each in SPOILT], ids=[each[0] for each in SPOILT]
)
def test_a_folder_that_cannot_work_is_one_line_before_anything_starts(
    spoil: Callable[[Path], None], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "model")
    spoil(folder)
    path = tmp_path / "c.toml"
    path.write_text(
        f'[model]\npath = "{folder}"\n[run]\ndir = "{tmp_path}/run"\n'
        '[policy]\naction_parser = "uitars"\ncoordinates = "thousand"\n'
    )
    for verb, more in (("up", "--dry-run"), ("rollout", ""), ("train", ""), ("eval", "")):
        with pytest.raises(SystemExit) as exit_:
            main([word for word in (verb, str(path), more) if word])
        out, err = capsys.readouterr()
        assert (exit_.value.code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("error: model.path = ")
        assert told in err
    assert not (tmp_path / "run").exists()


# --- at load


def _cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-5000])


def _text(folder: Path, **changes: Any) -> None:
    """Sizes of the language model, which qwen2_5_vl has flat."""
    change_json(folder, "config.json", **changes)


def _renumbered(folder: Path) -> None:
    """The ids of a pointer's tokens, without the tokens."""
    ids = {f"pointer_{name}_token_id": 11 + i for i, name in enumerate(("start", "pad", "end"))}
    change_json(folder, "config.json", **ids)


UNLOADABLE: list[tuple[str, Callable[[Path], None], str]] = [
    ("empty file", lambda f: (f / WEIGHTS).write_bytes(b"") and None, "copy (it|them) again"),
    ("LFS pointer", lambda f: (f / WEIGHTS).write_text("version 1\n") and None, "copy"),
    ("cut off", _cut, "copy (it|them) again"),
    (
        "a layer missing",
        lambda f: _text(f, num_hidden_layers=3),
        "tensors are missing or of another shape, the first is .*layers.2.*belongs to another model",
    ),
    (
        "another shape",
        lambda f: _text(f, intermediate_size=128),
        "tensors are missing or of another shape",
    ),
    (
        "patches of another",
        lambda f: change_json(f, "preprocessor_config.json", patch_size=16),
        "cuts patches of 32 pixels, the model takes 28",
    ),
    (
        "no image token",
        lambda f: change_json(f, "config.json", image_token_id=3),
        "no special token 3, the image_token_id of config.json; it belongs to another model",
    ),
    ("a pointer without a head", _renumbered, "missing|cannot be read|has nothing as"),
]


@pytest.mark.parametrize(
    ("spoil", "told"), [each[1:] for each in UNLOADABLE], ids=[each[0] for each in UNLOADABLE]
)
def test_a_folder_whose_parts_do_not_fit_is_refused_when_it_is_loaded(
    spoil: Callable[[Path], None], told: str, tmp_path: Path
) -> None:
    folder = build("qwen2_5_vl", tmp_path / "model")
    check_weights(folder)
    spoil(folder)
    assert model_problem(str(folder)) == ""
    for load in (load_policy, check_weights):
        with pytest.raises(ModelError, match=told) as no:
            load(folder)
        assert "\n" not in str(no.value)
        assert "ignore_mismatched" not in str(no.value)


@pytest.mark.parametrize("ratio", ["four", [4], float("nan"), 10**9, 0])
def test_a_ratio_that_is_none_is_told(ratio: object, tmp_path: Path) -> None:
    config = read_json(write_model(tmp_path, "qwen2_vl"), "config.json")
    config["vision_config"]["mlp_ratio"] = ratio
    with pytest.raises(ModelError, match="mlp_ratio must be a number"):
        shape_of(config)


def test_sizes_that_are_none_or_do_not_fit_are_told(tmp_path: Path) -> None:
    config = read_json(write_model(tmp_path), "config.json")
    with pytest.raises(ModelError, match="hidden_size must be a whole number"):
        shape_of({**config, "hidden_size": "big"})
    with pytest.raises(ModelError, match="gives vectors of 48 numbers, the language model takes"):
        shape_of({**config, "vision_config": {"out_hidden_size": 48}})


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_folder_has_no_problem(kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, kind)
    assert model_problem(str(folder)) == ""
    write_tensors(folder / WEIGHTS, zeros(read_json(folder, "config.json"), "BF16"))
    check_folder(folder)


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    tensors = zeros(read_json(folder, "config.json"))
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, held in parts.items():
        write_tensors(folder / file, {name: tensors[name] for name in held})
    placed = {name: file for file, held in parts.items() for name in held}
    write_json(folder, INDEX, {"weight_map": placed})
    check_folder(folder)
    (folder / "two.safetensors").unlink()
    with pytest.raises(ModelError, match=r"two\.safetensors is missing"):
        check_folder(folder)


def test_one_file_comes_before_an_older_index_as_in_transformers(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    shard = folder / "model-00001-of-00001.safetensors"
    placed = dict.fromkeys(zeros(read_json(folder, "config.json")), shard.name)
    write_json(folder, INDEX, {"weight_map": placed})
    assert weight_files(folder) == [folder / WEIGHTS]
    assert model_problem(str(folder)) == ""  # the shards are gone
    shard.write_bytes((folder / WEIGHTS).read_bytes())
    assert weight_files(folder) == [folder / WEIGHTS]


def test_code_in_a_folder_is_never_run(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    change_json(folder, "config.json", model_type="own", auto_map={"AutoConfig": "own.Config"})
    assert "model_type is own, which dart does not load" in model_problem(str(folder))
    change_json(folder, "config.json", model_type="qwen2_5_vl")
    assert model_problem(str(folder)) == ""
    assert not (tmp_path / "ran").exists()


def test_resized_numbers_need_the_preprocessor_where_episodes_are_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        f'[model]\npath = "{tmp_path}/away"\n[run]\ndir = "{tmp_path}/run"\n'
        '[policy]\naction_parser = "uitars"\ncoordinates = "resized"\n'
    )
    with pytest.raises(SystemExit) as exit_:
        main(["env", str(path), "--dry-run"])
    err = capsys.readouterr().err
    assert (exit_.value.code, err.count("\n")) == (2, 1)
    assert "policy.coordinates" in err
    assert "preprocessor_config.json is missing; copy it" in err
    write_model(tmp_path / "away", "qwen2_5_vl")
    with pytest.raises(SystemExit) as exit_:
        main(["env", str(path), "--dry-run"])
    assert exit_.value.code == 0


def test_a_folder_of_weights_is_a_model_s_whatever_its_config_says(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "config.json").write_text("{")
    assert is_model_folder(folder)
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run", "config.json", {"run": {"dir": "runs/a"}})
    assert not is_model_folder(tmp_path / "run")
    assert not is_model_folder(tmp_path / "nothing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert not is_model_folder(tmp_path / "loop")
