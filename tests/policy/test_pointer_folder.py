"""Folders with a pointer head: made from every kind of folder, and loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bus.errors import ModelError
from dart_cli.config.schema import Config, PolicyConfig
from dart_cli.data.exchange.compatibility import model_facts
from dart_cli.policy.families import FAMILIES
from dart_cli.policy.model import LoadedPolicy, load_policy, resolve
from dart_cli.policy.pointer.head import initial_head
from dart_cli.policy.pointer.tokens import TRIPLE, PointerTokens

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


def test_what_a_pointer_forces() -> None:
    tokens = PointerTokens(5, 6, 7)
    assert [tokens.forced_after(each) for each in (4, 5, 6, 7)] == [None, 6, 7, None]
