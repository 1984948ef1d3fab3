"""A pack of trees is each of its paths alone: values and gradients, of every model class."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.overrides import TorchFunctionMode

from dart_cli.policy.families import FAMILIES
from dart_cli.policy.forward import collate, logits, rope_positions
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.model import LoadedPolicy, load_policy
from dart_cli.policy.pack_plan import PackLayout
from dart_cli.policy.packed import PackedInputs, packed_hidden

Family = Callable[[str], Path]
CPU = torch.device("cpu")

every_family = pytest.mark.parametrize("model_type", FAMILIES)


class InDouble(TorchFunctionMode):
    """Keeps float64 where the model classes compute in float32 (norms, rotations): 1e-9 needs it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        to_single = func is torch.Tensor.float or (
            func is torch.Tensor.to and torch.float32 in (*args[1:], *(kwargs or {}).values())
        )
        if to_single and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


@pytest.fixture
def in_double() -> Iterator[None]:
    with InDouble():
        yield


def screen(policy: LoadedPolicy, seed: int, width: int, height: int) -> PreparedImage:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return policy.images.of_image(f"{seed}-{width}-{height}", Image.fromarray(noise))


@dataclass(frozen=True)
class Node:
    """Tokens of a node, -1 where an image of `images` stands, in order."""

    parent: int
    parts: tuple[int | PreparedImage, ...]


def tokens_of(policy: LoadedPolicy, parts: Sequence[int | PreparedImage]) -> list[int]:
    tokens: list[int] = []
    for part in parts:
        is_image = isinstance(part, PreparedImage)
        tokens += [policy.image_token_id] * part.tokens if is_image else [part]
    return tokens


def images_of(parts: Sequence[int | PreparedImage]) -> list[PreparedImage]:
    return [part for part in parts if isinstance(part, PreparedImage)]


def path_of(nodes: Sequence[Node], node: int) -> list[int | PreparedImage]:
    before = path_of(nodes, nodes[node].parent) if nodes[node].parent >= 0 else []
    return [*before, *nodes[node].parts]


def packed(policy: LoadedPolicy, nodes: Sequence[Node]) -> PackedInputs:
    starts, tokens, positions = [0], [], []
    distinct: list[PreparedImage] = []
    shown: list[int] = []
    for index, node in enumerate(nodes):
        own = tokens_of(policy, node.parts)
        path = path_of(nodes, index)
        grids = [image.grid for image in images_of(path)]
        whole, _ = rope_positions(
            tokens_of(policy, path), grids, policy.image_token_id, policy.images.merge
        )
        positions.append(whole[:, -len(own) :])
        tokens += own
        starts.append(len(tokens))
        for image in images_of(node.parts):
            if image not in distinct:
                distinct.append(image)
            shown.append(distinct.index(image))
    return PackedInputs(
        torch.tensor(tokens),
        torch.cat(positions, dim=1),
        PackLayout(tuple(starts), tuple(node.parent for node in nodes)),
        tuple(distinct),
        tuple(shown),
    )


def text(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(20, 250) for _ in range(count)]


def forest(policy: LoadedPolicy) -> list[Node]:
    """Two trees, one of depth 3, a chain that shows three screens, and a node alone."""
    draw = random.Random(5)
    first, second, third = (
        screen(policy, 1, 112, 84),
        screen(policy, 2, 84, 112),
        screen(policy, 3, 112, 112),
    )
    return [
        Node(-1, (*text(draw, 5), first, *text(draw, 3))),
        Node(0, (*text(draw, 4), second, *text(draw, 6))),
        Node(1, (*text(draw, 2), first, *text(draw, 1))),
        Node(1, tuple(text(draw, 9))),
        Node(0, tuple(text(draw, 1))),
        Node(-1, (second, *text(draw, 4), third, *text(draw, 5), first, *text(draw, 7))),
        Node(-1, tuple(text(draw, 11))),
        Node(6, (third, *text(draw, 2))),
        Node(2, tuple(text(draw, 3))),
        Node(-1, tuple(text(draw, 1))),
    ]


SHAPES: dict[str, Callable[[LoadedPolicy], list[Node]]] = {
    "forest": forest,
    "chain": lambda policy: forest(policy)[5:6],
    "text alone": lambda policy: [forest(policy)[6]],
    "one token": lambda policy: [forest(policy)[9]],
    "two levels": lambda policy: forest(policy)[:2],
}


def read_out(hidden: torch.Tensor, tokens: torch.Tensor, seed: int) -> torch.Tensor:
    """A number that weighs every value: sum of log-probabilities with random weights."""
    weights = torch.randn(len(tokens), generator=torch.Generator().manual_seed(seed)).to(hidden)
    return (hidden.log_softmax(-1).gather(1, tokens[:, None])[:, 0] * weights).sum()


def gradients(policy: LoadedPolicy) -> dict[str, torch.Tensor]:
    found = {
        name: parameter.grad.clone()
        for name, parameter in policy.model.named_parameters()
        if parameter.grad is not None
    }
    policy.model.zero_grad(set_to_none=True)
    return found


def double(folder: Path, *, freeze_vision: bool = False) -> LoadedPolicy:
    policy = load_policy(folder, "float64")
    inner: Any = policy.model.model
    inner.visual.requires_grad_(not freeze_vision)
    return policy


def assert_close(mine: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-9) -> None:
    """Equal relative to the largest value."""
    assert mine.shape == theirs.shape
    assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1e-6)


@pytest.mark.usefixtures("in_double")
@every_family
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("freeze_vision", [False, True])
def test_a_pack_is_each_of_its_paths_alone(
    model_type: str, shape: str, freeze_vision: bool, family: Family
) -> None:
    policy = double(family(model_type), freeze_vision=freeze_vision)
    nodes = SHAPES[shape](policy)
    inputs = packed(policy, nodes)
    head = policy.model.get_output_embeddings().weight
    mine = packed_hidden(policy.model, inputs) @ head.T
    bounds = list(pairwise(inputs.layout.starts))
    sum(
        read_out(mine[start:end], inputs.input_ids[start:end], index)
        for index, (start, end) in enumerate(bounds)
    ).backward()
    my_gradients = gradients(policy)
    theirs: list[torch.Tensor] = []
    for index, (start, end) in enumerate(bounds):
        path = path_of(nodes, index)
        alone = collate(
            [tokens_of(policy, path)],
            [images_of(path)],
            pad_token=policy.pad_token_id,
            image_token=policy.image_token_id,
            merge=policy.images.merge,
        )
        theirs.append(logits(policy.model, alone, last=end - start)[0])
        read_out(theirs[-1], inputs.input_ids[start:end], index).backward()
    assert_close(mine.detach(), torch.cat(theirs).detach())
    their_gradients = gradients(policy)
    assert my_gradients.keys() == their_gradients.keys()
    has_vision = any("visual" in name for name in my_gradients)
    assert has_vision == (bool(inputs.images) and not freeze_vision)
    for name, gradient in my_gradients.items():
        assert_close(gradient, their_gradients[name])
