"""Folders with a pointer head: made from every kind of folder, and loaded."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bus.errors import DiskError, ModelError
from dart_cli.cli.main import main
from dart_cli.config.model_folder import INDEX, SINGLE, resolve
from dart_cli.config.rules import broken_rules
from dart_cli.config.rules.policy import SERVED
from dart_cli.config.schema import Config, PolicyConfig
from dart_cli.data.checks import model_facts
from dart_cli.language.pointer_tokens import TRIPLE, PointerTokens
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.model_files import PolicyFiles, new_folder
from dart_cli.policy.pointer_folder import add_pointer
from dart_cli.policy.pointer_head import initial_head
from dart_cli.weights.folder import model_identity
from scripts.small_models import FAMILIES, build

Folder = Callable[[str], Path]

EVERY = ("builtin:tiny", *FAMILIES)
every_model = pytest.mark.parametrize("name", EVERY)


def original(name: str, family: Folder) -> LoadedPolicy:
    return load_policy(resolve(name) if name == "builtin:tiny" else family(name))


@every_model
def test_a_pointer_is_added_and_all_else_stays(
    name: str, family: Folder, pointer_folder: Folder
) -> None:
    before = original(name, family)
    after = load_policy(pointer_folder(name), pointing="pointer")
    first = max(before.tokenizer.get_vocab().values()) + 1
    assert after.pointer == PointerTokens(first, first + 1, first + 2)
    assert after.encode(f"click({TRIPLE})").count(first) == 1
    assert tuple(after.encode(TRIPLE)) == after.pointer.triple
    assert after.decode(after.pointer.triple) == TRIPLE
    mine = dict(after.model.named_parameters())
    for key, tensor in before.model.named_parameters():
        if key.endswith(("embed_tokens.weight", "lm_head.weight")):
            assert torch.equal(mine[key][:first], tensor[:first])
            mean = tensor[:first].double().mean(dim=0)
            torch.testing.assert_close(mine[key][first : first + 3].double(), mean.expand(3, -1))
        else:
            assert torch.equal(mine[key], tensor)
    drawn = initial_head(mine["pointer_head.norm.weight"].shape[0], 3)
    assert {f"pointer_head.{key}" for key in drawn} == mine.keys() - dict(
        before.model.named_parameters()
    ).keys()
    assert all(torch.equal(mine[f"pointer_head.{key}"], tensor) for key, tensor in drawn.items())
    assert after.literal.mark(TRIPLE) != TRIPLE  # spelt by a task, it is only text


@every_model
def test_start_alone_is_drawn_and_only_where_the_policy_points(
    name: str, family: Folder, pointer_folder: Folder
) -> None:
    points = load_policy(pointer_folder(name), weights=False, pointing="pointer")
    writes = load_policy(pointer_folder(name), weights=False)
    pointer = points.pointer
    assert pointer is not None
    assert writes.pointer == pointer
    assert set(pointer.triple) & set(points.forbidden_token_ids) == {pointer.pad, pointer.end}
    assert set(pointer.triple) <= set(writes.forbidden_token_ids)
    assert points.absent_token_ids == set(points.forbidden_token_ids) - {pointer.pad, pointer.end}
    assert writes.absent_token_ids == set(writes.forbidden_token_ids)
    before = {*original(name, family).forbidden_token_ids, *pointer.triple}
    assert before == set(writes.forbidden_token_ids)


@pytest.mark.parametrize("pointing", ["text", "pointer"])
def test_imports_are_compared_with_the_same_tokens(pointing: str, pointer_folder: Folder) -> None:
    folder = pointer_folder("builtin:tiny")
    config = Config.model_validate(
        {"model": {"path": str(folder)}, "policy": {"pointing": pointing}}
    )
    facts = model_facts(config)
    assert facts is not None
    policy = load_policy(folder, weights=False, pointing=config.policy.pointing)
    assert facts.forbidden == policy.absent_token_ids


def test_a_folder_without_a_head_cannot_point() -> None:
    with pytest.raises(ModelError, match="dart model add-pointer builtin:tiny OUT"):
        load_policy("builtin:tiny", pointing="pointer")
    assert load_policy("builtin:tiny", weights=False).pointer is None
    assert PolicyConfig().pointing == "text"


def test_adapters_and_an_engine_without_the_head_are_refused(pointer_folder: Folder) -> None:
    config = Config.model_validate(
        {
            "model": {"path": str(pointer_folder("qwen2_vl")), "lora": {}},
            "policy": {"pointing": "pointer"},
            "rollout": {"engine": "vllm"},
        }
    )
    told = [str(each) for each in broken_rules(SERVED, config)]
    assert len(told) == 2
    assert "remove [model.lora]" in told[0]
    assert 'set rollout.engine = "transformers"' in told[1]


# --- the verb -----------------------------------------------------------------------------------


def add(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["model", "add-pointer", *arguments])
    return int(exit_.value.code or 0)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_verb_writes_a_folder_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    assert add("builtin:tiny", str(out)) == 0
    assert "tokens 1561, 1562, 1563" in capsys.readouterr().out
    assert {file.name for file in out.iterdir()} == {
        file.name for file in resolve("builtin:tiny").iterdir()
    }
    assert {stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()} == {
        stat.S_IMODE((out / "config.json").stat().st_mode)
    }
    before = contents(out)
    assert add("builtin:tiny", str(other), "--seed", "1") == 0
    capsys.readouterr()
    assert {name for name, held in contents(other).items() if held != before[name]} == {
        "model.safetensors"
    }
    assert add("builtin:tiny", str(out), "--seed", "1") == 2
    assert "out exists; name a folder that does not" in capsys.readouterr().err.replace("\n", "")
    assert contents(out) == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["other", "out"]


def _of_a_token(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"][-1]["content"] = "<|pointer_pad|>"
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


REFUSED: list[tuple[str, Callable[[Path], object], str]] = [
    ("no weights", lambda f: (f / "model.safetensors").unlink(), "has no *.safetensors"),
    ("a token", _of_a_token, "has the token <|pointer_pad|> already"),
    ("broken", lambda f: (f / "config.json").write_text("{"), "is not JSON"),
    ("a tokenizer that is none", lambda f: _change(f, model=[]), "tokenizer.json cannot be read"),
    (
        "a tokenizer that is not read",
        lambda f: _change(f, normalizer={"type": "of the future"}),
        "tokenizer.json cannot be read",
    ),
]


def _change(folder: Path, **changes: object) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, **changes}))


@pytest.mark.parametrize(
    ("spoil", "told"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED]
)
def test_a_folder_that_gets_no_head_is_one_line_and_nothing_is_written(
    spoil: Callable[[Path], object],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve("builtin:tiny"), folder)
    spoil(folder)
    assert add(str(folder), str(tmp_path / "out")) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert told in err
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_a_second_head_is_refused(
    tmp_path: Path, pointer_folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert add(str(pointer_folder("builtin:tiny")), str(tmp_path / "out")) == 2
    assert "has a pointer head already" in capsys.readouterr().err
    assert add(str(tmp_path / "none"), str(tmp_path / "out")) == 2
    assert add("builtin:tiny", str(tmp_path / "none" / "out")) == 2
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err


def test_shards_stay_shards(tmp_path: Path, pointer_folder: Folder) -> None:
    folder = build("qwen2_5_vl", tmp_path / "model", max_shard_size="60KB", dtype=torch.bfloat16)
    add_pointer(folder, tmp_path / "out", seed=3)
    before, after = ({file.name for file in each.iterdir()} for each in (folder, tmp_path / "out"))
    assert len(before) > 8
    assert after - before == {"model-pointer-head.safetensors"}
    assert before <= after
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    with PolicyFiles(tmp_path / "out") as files:
        sizes = [files.whole(name).nbytes for name in files.names()]
    assert index["metadata"]["total_size"] == sum(sizes)
    loaded = load_policy(tmp_path / "out", "bfloat16", pointing="pointer").model
    whole = load_policy(pointer_folder("qwen2_5_vl"), "bfloat16", pointing="pointer").model
    for (name, mine), (_, other) in zip(
        loaded.named_parameters(), whole.named_parameters(), strict=True
    ):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine, other, atol=1e-3, rtol=1e-2, msg=name)


def test_what_a_pointer_forces() -> None:
    tokens = PointerTokens(5, 6, 7)
    assert [tokens.forced_after(each) for each in (4, 5, 6, 7)] == [None, 6, 7, None]


def test_a_folder_that_was_saved_anew_over_shards_is_one_model_for_every_loader(
    family: Folder, tmp_path: Path
) -> None:
    folder, shard = tmp_path / "model", "model-00001-of-00001.safetensors"
    shutil.copytree(family("qwen2_5_vl"), folder)
    new = load_file(folder / SINGLE)
    save_file({key: each + 1 for key, each in new.items()}, folder / shard, {"format": "pt"})
    (folder / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(new, shard)})
    )
    add_pointer(folder, tmp_path / "pointing", seed=3)
    for each, pointing in ((folder, "text"), (tmp_path / "pointing", "pointer")):
        engine = load_policy(each, pointing=pointing).model.state_dict()  # type: ignore[arg-type]
        with PolicyFiles(each) as files:
            assert all(torch.equal(engine[name], files.whole(name)) for name in files.names())
    identity = model_identity(folder)
    (folder / shard).unlink()
    assert model_identity(folder) == identity


def test_a_folder_without_the_right_to_it_is_not_said_to_be_full(tmp_path: Path) -> None:
    with (
        pytest.raises(DiskError, match=r"Permission denied; give this user the right to it$"),
        new_folder(tmp_path / "out"),
    ):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
