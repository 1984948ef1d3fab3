"""A model folder that cannot work is refused whole before anything starts, in words of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest

from bus.errors import ModelError
from dart_cli.cli.main import main
from dart_cli.config.model_files import screens
from dart_cli.config.model_tensors import parameter_count
from dart_cli.config.models import check_model, is_model_folder, model_problem
from dart_cli.config.pointer_head import TOKENS
from tests.config.model_parts import change_json, write_json, write_model, write_tensors, zeros

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def _drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _config(folder: Path) -> dict[str, object]:
    tree: dict[str, object] = json.loads((folder / "config.json").read_text())
    return tree


def _pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def _cut(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-5000])


def _cut_in_the_header(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:1000])


def _longer(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes() + b"x")


def _integers(folder: Path) -> None:
    write_tensors(folder / WEIGHTS, zeros(_config(folder), "I8"))


def _without_a_tensor(folder: Path) -> None:
    tensors = zeros(_config(folder))
    del tensors["language_model.layers.1.mlp.up_proj.weight"]
    write_tensors(folder / WEIGHTS, tensors)


def _of_another_shape(folder: Path) -> None:
    change_json(folder, "config.json", intermediate_size=128)


def _deeper(folder: Path) -> None:
    change_json(folder, "config.json", num_hidden_layers=3)


def _overlapping(folder: Path) -> None:
    entries = {"a": ("F32", (2,), bytes(8)), "b": ("F32", (2,), bytes(8))}
    write_tensors(folder / WEIGHTS, entries, b={"data_offsets": [4, 12]})
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-4])


def _of_wrong_size(folder: Path) -> None:
    write_tensors(folder / WEIGHTS, {"a": ("F32", (2,), bytes(8))}, a={"shape": [3]})


def _lost_shard(folder: Path) -> None:
    write_json(folder, INDEX, {"weight_map": {"a": "model-00001-of-00002.safetensors"}})


def _index_of_another(folder: Path) -> None:
    write_json(folder, INDEX, {"weight_map": {"language_model.extra": WEIGHTS}})


def _loop(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("tokenizer.json")


def _adapters_alone(folder: Path) -> None:
    (folder / "config.json").unlink()
    write_json(folder, "adapter_config.json", {"base_model_name_or_path": "Base-7B", "r": 32})


def _pointing(
    folder: Path,
    *,
    head: bool = True,
    wrong: dict[str, tuple[int, ...]] | None = None,
    **keys: int | None,
) -> None:
    """A pointer head, tokens 11 to 13; without its tensors, or with some of a `wrong` shape."""
    ids = {f"pointer_{name}_token_id": 11 + i for i, name in enumerate(("start", "pad", "end"))}
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    added += [{"id": 11 + i, "content": token} for i, token in enumerate(TOKENS)]
    change_json(folder, "tokenizer.json", added_tokens=added)
    tensors = zeros({**_config(folder), **(ids if head else {})})
    for name, shape in (wrong or {}).items():
        tensors[name] = ("F32", shape, bytes(4 * prod(shape)))
    write_tensors(folder / WEIGHTS, tensors)
    change_json(folder, "config.json", **{**ids, **keys})


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
    ("no tokenizer", _drop("tokenizer.json"), "tokenizer.json is missing"),
    ("a loop of links", _loop, "tokenizer.json is missing"),
    ("empty tokenizer", lambda f: write_json(f, "tokenizer.json", {}), "is no tokenizer"),
    (
        "tokenizer of another",
        lambda f: change_json(
            f, "tokenizer.json", model={"vocab": {"a": 5000}}, added_tokens=[{"id": 319}]
        ),
        "token 5000, the model's embeddings have 320 rows",
    ),
    (
        "no image token",
        lambda f: change_json(f, "tokenizer.json", added_tokens=[]),
        "no special token 319",
    ),
    ("no preprocessor", _drop("preprocessor_config.json"), "preprocessor_config.json is missing"),
    (
        "patches of another",
        lambda f: change_json(f, "preprocessor_config.json", patch_size=16),
        "patch_size is 16, the model's is 14",
    ),
    (
        "pixels that are none",
        lambda f: change_json(f, "preprocessor_config.json", min_pixels="few"),
        "no whole numbers",
    ),
    ("no template", _drop("tokenizer_config.json"), "no chat template"),
    ("empty file", lambda f: (f / WEIGHTS).write_bytes(b"") and None, "is no safetensors file"),
    ("LFS pointer", lambda f: (f / WEIGHTS).write_text("version 1\n") and None, "without LFS"),
    ("cut off", _cut, "is cut off"),
    ("cut in its header", _cut_in_the_header, "is no safetensors file"),
    ("too long", _longer, "has bytes of no tensor"),
    ("overlapping", _overlapping, "b overlaps a"),
    ("of wrong size", _of_wrong_size, "a has 8 bytes, F32 [3] takes 12"),
    ("lost shard", _lost_shard, "model-00001-of-00002.safetensors is missing"),
    ("another's index", _index_of_another, "has no tensor language_model.extra"),
    ("a tensor missing", _without_a_tensor, "the first is language_model.layers.1.mlp.up_proj"),
    ("a layer missing", _deeper, "12 of the "),
    ("another shape", _of_another_shape, "has the shape [96, 64], config.json asks for [128, 64]"),
    ("integers", _integers, "is I8 ("),
    (
        "quantised",
        lambda f: change_json(f, "config.json", quantization_config={"quant_method": "awq"}),
        "quantised weights cannot be trained",
    ),
    (
        "a size that is none",
        lambda f: change_json(f, "config.json", hidden_size="big"),
        "hidden_size must be a whole number",
    ),
    (
        "a preprocessor of squares",
        lambda f: change_json(f, "preprocessor_config.json", size=224),
        "size must have shortest_edge and longest_edge, got '224'",
    ),
    (
        "tokens that are none",
        lambda f: change_json(f, "config.json", image_token_id=[319]),
        "no special token [319]",
    ),
    (
        "a pointer without a head",
        lambda f: _pointing(f, head=False),
        "14 of its tensors are missing, the first is pointer_head.norm.weight; copy every file again",
    ),
    (
        "a head of another shape",
        lambda f: _pointing(f, wrong={"pointer_head.out.weight": (32, 32)}),
        "`dart model add-pointer`",
    ),
    (
        "a pointer without a token",
        lambda f: _pointing(f, pointer_pad_token_id=None),
        "pointer_pad_token_id must be a token id, got None",
    ),
    (
        "another pointer",
        lambda f: _pointing(f, pointer_end_token_id=14),
        "pointer_end_token_id is 14, but tokenizer.json has 13 as <|pointer_end|>",
    ),
    (
        "parts that do not fit",
        lambda f: change_json(f, "config.json", vision_config={"out_hidden_size": 48}),
        "gives vectors of 48 numbers, the language model takes 64",
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
        '[policy]\ncodec = "uitars"\ncoordinates = "thousand"\n'
    )
    for verb, more in (("up", "--dry-run"), ("rollout", ""), ("train", ""), ("eval", "")):
        with pytest.raises(SystemExit) as exit_:
            main([word for word in (verb, str(path), more) if word])
        out, err = capsys.readouterr()
        assert (exit_.value.code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("error: model.path = ")
        assert told in err
        assert "ignore_mismatched" not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("ratio", [None, "four", [4], float("nan"), 10**9, 0])
def test_a_ratio_that_is_none_is_told(ratio: object, tmp_path: Path) -> None:
    folder = write_model(tmp_path, "qwen2_vl")
    vision = _config(folder)["vision_config"]
    assert isinstance(vision, dict)
    change_json(folder, "config.json", vision_config={**vision, "mlp_ratio": ratio})
    assert "mlp_ratio must be a number" in model_problem(str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_folder_has_no_problem_and_a_size(kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, kind)
    assert model_problem(str(folder)) == ""
    assert parameter_count(folder) > 10_000
    write_tensors(folder / WEIGHTS, zeros(_config(folder), "BF16"))
    check_model(folder)


def test_a_folder_with_a_pointer_head_has_no_problem(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    _pointing(folder)
    assert model_problem(str(folder)) == ""
    tensors = zeros(_config(folder))
    assert sum(prod(tensors[name][1]) for name in tensors if "pointer" in name) == 8 * 64**2 + 640


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    tensors = zeros(_config(folder))
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, held in parts.items():
        write_tensors(folder / file, {name: tensors[name] for name in held})
    placed = {name: file for file, held in parts.items() for name in held}
    write_json(folder, INDEX, {"weight_map": placed})
    check_model(folder)
    (folder / "two.safetensors").unlink()
    with pytest.raises(ModelError, match=r"two\.safetensors is missing"):
        check_model(folder)


def test_code_in_a_folder_is_never_run(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    change_json(folder, "config.json", model_type="own", auto_map={"AutoConfig": "own.Config"})
    assert "model_type is own, want one of" in model_problem(str(folder))
    change_json(folder, "config.json", model_type="qwen2_5_vl")
    assert model_problem(str(folder)) == ""
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_of_another_preprocessor_are_named_at_the_dry_run(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "model", kind)
    path = tmp_path / "c.toml"
    path.write_text(
        f'[model]\npath = "{folder}"\n[run]\ndir = "{tmp_path}/run"\n'
        '[policy]\ncodec = "uitars"\ncoordinates = "resized"\n'
    )
    with pytest.raises(SystemExit) as exit_:
        main(["up", str(path), "--dry-run"])
    err = capsys.readouterr().err
    assert (exit_.value.code, err.count("\n")) == (2, 1)
    wanted = screens(folder)
    sets = [
        f"policy.resize_factor={wanted.factor}",
        f"policy.resize_min_pixels={wanted.min_pixels}",
        f"policy.resize_max_pixels={wanted.max_pixels}",
    ]
    for each in sets:
        assert each.replace("=", " = ") in err
    words = [word for each in sets for word in ("--set", each)]
    with pytest.raises(SystemExit) as exit_:
        main(["up", str(path), "--dry-run", *words])
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
