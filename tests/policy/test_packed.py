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
from torch.utils._python_dispatch import TorchDispatchMode

from bus.errors import ModelError
from dart_cli.hardware import accelerator
from dart_cli.policy import pack_plan
from dart_cli.policy.forward import collate, image_features, logits, rope_positions
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.pack_plan import PackLayout, plan_pack
from dart_cli.policy.packed import PackedInputs, packed_attention, packed_hidden
from scripts.small_models import FAMILIES
from tests.devices import no_gpu

Family = Callable[[str], Path]
CPU = torch.device("cpu")
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


# --- attention alone ----------------------------------------------------------------------------


def drawn_layout(generator: random.Random, nodes: int, longest: int) -> PackLayout:
    starts = [0]
    for _ in range(nodes):
        starts.append(starts[-1] + generator.randint(1, longest))
    return PackLayout(
        tuple(starts), tuple(generator.randint(-1, index - 1) for index in range(nodes))
    )


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackLayout, window: int
) -> torch.Tensor:
    """The reference: an L x L mask, written down from the definition."""
    seen = torch.zeros(layout.length, layout.length, dtype=torch.bool, device=query.device)
    for node, (start, end) in enumerate(pairwise(layout.starts)):
        path = layout.path(node).tolist()
        for token in range(start, end):
            before = path[: path.index(token) + 1]
            seen[token, before[-window:] if window else before] = True
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def drawn_rows(
    layout: PackLayout,
    kv_heads: int,
    dtype: torch.dtype,
    device: torch.device = CPU,
    width: int = 8,
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    heads = (4, kv_heads, kv_heads)
    return [
        torch.randn(layout.length, each, width, generator=generator)
        .to(device, dtype)
        .requires_grad_()
        for each in heads
    ]


def both(
    layout: PackLayout, rows: Sequence[torch.Tensor], window: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and gradients of the pack and of the reference (in float64)."""
    exact = [each.detach().double().requires_grad_() for each in rows]
    plan = plan_pack(layout, rows[0].device, rows[0].dtype, window=window)
    outputs = packed_attention(*rows, plan, 0.3), dense(*exact, layout, window)
    weights = torch.randn(outputs[1].shape, generator=torch.Generator().manual_seed(2))
    found = []
    for output, inputs in zip(outputs, (rows, exact), strict=True):
        gradients = torch.autograd.grad((output * weights.to(output)).sum(), inputs)
        found.append([output.detach(), *gradients])
    return found[0], found[1]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("window", [0, 1, 5])
def test_packed_attention_is_the_dense_one(
    seed: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(pack_plan, "QUERY_BLOCK", draw.choice([1, 4, 512]))
    monkeypatch.setattr(pack_plan, "LARGE", draw.choice([1, 60, 2**16]))
    monkeypatch.setattr(pack_plan, "BUCKET_COST", draw.choice([0, 100, 4096]))
    layout = drawn_layout(draw, nodes=draw.randint(1, 14), longest=draw.choice([1, 9, 20]))
    rows = drawn_rows(layout, kv_heads=draw.choice([1, 2, 4]), dtype=torch.float64)
    for mine, theirs in zip(*both(layout, rows, window), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_layouts_that_are_none_are_refused() -> None:
    for starts, parents in (((0, 2), (0,)), ((0, 2, 2), (-1, 0)), ((1, 2), (-1,)), ((0, 2), ())):
        with pytest.raises(ValueError, match=r"pack|parent"):
            PackLayout(starts, parents)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else [results]:
            if isinstance(result, torch.Tensor):
                own = result.untyped_storage().nbytes() // result.element_size()
                self.elements = max(self.elements, own)
        return results


@every_family
def test_no_tensor_of_a_pack_is_quadratic_in_its_length(model_type: str, family: Family) -> None:
    """A chain of 2500 tokens, a branch of 1400 behind 300 of them, and many short branches."""
    policy = load_policy(family(model_type))
    draw = random.Random(3)
    nodes = [Node(-1, tuple(text(draw, 2500))), Node(-1, tuple(text(draw, 300)))]
    nodes += [Node(1, tuple(text(draw, 1400)))]
    nodes += [Node(1, tuple(text(draw, 40))) for _ in range(10)]
    inputs = packed(policy, nodes)
    length = inputs.layout.length
    with Largest() as largest:
        packed_hidden(policy.model, inputs).sum().backward()
    assert largest.elements < length * length / 8
    assert largest.elements >= length * 64  # hidden states were seen


def test_short_completions_of_one_prompt_attend_in_one_call() -> None:
    """Speed on a CPU is in few calls."""
    lengths = [60, *[8, 9, 12, 15] * 8]
    starts = [0, *np.cumsum(lengths).tolist()]
    layout = PackLayout(tuple(starts), (-1, *[0] * 32))
    plan = plan_pack(layout, CPU, torch.float32)
    assert [bucket.count for bucket in plan.buckets] == [1, 32]


# --- beside padded batches ------------------------------------------------------------------------


@every_family
def test_packs_leave_padded_batches_as_they_were(model_type: str, family: Family) -> None:
    policy = load_policy(family(model_type))
    nodes = forest(policy)
    batch = collate(
        [tokens_of(policy, path_of(nodes, index)) for index in (2, 5, 6)],
        [images_of(path_of(nodes, index)) for index in (2, 5, 6)],
        pad_token=policy.pad_token_id,
        image_token=policy.image_token_id,
        merge=policy.images.merge,
    )
    with torch.no_grad():
        before = logits(policy.model, batch, last=3)
        packed_hidden(policy.model, packed(policy, nodes))
        after = logits(policy.model, batch, last=3)
        inner: Any = policy.model.model
        inner.language_model.config._attn_implementation = "sdpa"
        plain = logits(policy.model, batch, last=3)
    assert torch.equal(before, after)
    assert torch.equal(before, plain)


def test_a_model_whose_layers_take_no_packs_is_refused(family: Family) -> None:
    """transformers would pass the layout on, and its attention ignore it."""
    policy = load_policy(family("qwen2_vl"))
    inner: Any = policy.model.model
    inner.language_model.config._attn_implementation = "sdpa"
    with pytest.raises(ModelError, match="attention is sdpa, which cannot take packs"):
        packed_hidden(policy.model, packed(policy, forest(policy)))


def test_features_computed_before_are_used(family: Family) -> None:
    policy = load_policy(family("qwen3_vl"))
    inputs = packed(policy, forest(policy))
    with torch.no_grad():
        features = image_features(policy.model, inputs.images)
        expected = packed_hidden(policy.model, inputs)
        inner: Any = policy.model.model
        inner.visual = None  # nothing may ask for it again
        assert torch.equal(packed_hidden(policy.model, inputs, features=features), expected)


# --- torch's packed call --------------------------------------------------------------------------


def varlen_by_definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """What `varlen_attn` documents: each sequence alone, aligned at its end."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert window_size[1] == 0
    outputs = []
    bounds = zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True)
    for (q_start, q_end), (k_start, k_end) in bounds:
        queries, keys = q_end - q_start, k_end - k_start
        assert 0 < queries <= max_q
        assert keys <= max_k
        order = torch.arange(keys - queries, keys)[:, None]
        seen = torch.arange(keys) <= order
        if window_size[0] >= 0:
            seen &= torch.arange(keys) >= order - window_size[0]
        scores = torch.einsum("qhd,khd->hqk", query[q_start:q_end], key[k_start:k_end])
        weights = (scores / query.shape[2] ** 0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value[k_start:k_end]))
    return torch.cat(outputs)


def varlen_of_later_torch(
    *arguments: Any,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    query, key, value, *rest = arguments
    groups = query.shape[1] // key.shape[1]
    assert enable_gqa == (groups > 1)
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    if scale is not None:
        query = query * scale * query.shape[2] ** 0.5
    return varlen_by_definition(query, key, value, *rest, window_size=window_size)


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Plans of the packed call on a CPU too."""
    monkeypatch.setattr(
        pack_plan,
        "_bucket_plan",
        lambda layout, device, _, w: pack_plan._varlen_plan(layout, device, w),
    )
    accelerator._varlen_call.cache_clear()
    yield monkeypatch
    accelerator._varlen_call.cache_clear()


@pytest.mark.parametrize("call", [varlen_by_definition, varlen_of_later_torch])
@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("seed", range(5))
def test_the_packed_call_is_given_what_makes_it_the_dense_one(
    seed: int, window: int, call: Callable[..., Any], varlen: pytest.MonkeyPatch
) -> None:
    varlen.setattr("torch.nn.attention.varlen.varlen_attn", call)
    draw = random.Random(seed)
    layout = drawn_layout(draw, nodes=draw.randint(1, 14), longest=9)
    rows = drawn_rows(layout, kv_heads=draw.choice([1, 2, 4]), dtype=torch.float64)
    for mine, theirs in zip(*both(layout, rows, window), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_torch_without_the_packed_call_is_refused(varlen: pytest.MonkeyPatch) -> None:
    varlen.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, is_causal: query)
    layout = PackLayout((0, 3), (-1,))
    with pytest.raises(ModelError, match=r"install torch 2\.11 or later, or set model\.dtype"):
        both(layout, drawn_rows(layout, 1, torch.float64), 0)


# --- CUDA -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)]
)
def test_packed_attention_on_a_gpu_is_the_dense_one(
    dtype: torch.dtype, tolerance: float, window: int, kv_heads: int
) -> None:
    """varlen_attn in bfloat16 and float16, buckets in float32; relative to the largest value."""
    device = torch.device("cuda")
    layout = drawn_layout(random.Random(kv_heads), nodes=12, longest=70)
    rows = drawn_rows(layout, kv_heads, dtype, device, width=64)
    plan = plan_pack(layout, device, dtype, window=window)
    assert bool(plan.buckets) == (dtype == torch.float32)
    for mine, theirs in zip(*both(layout, rows, window), strict=True):
        assert_close(mine.double(), theirs, tolerance)


@pytest.mark.gpu
@no_gpu
@every_family
def test_a_pack_on_a_gpu_is_the_one_on_the_cpu(model_type: str, family: Family) -> None:
    expected = load_policy(family(model_type))
    nodes = forest(expected)
    with torch.no_grad():
        truth = packed_hidden(expected.model, packed(expected, nodes))
        for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 5e-2)):
            policy = load_policy(family(model_type), dtype, "cuda")
            found = packed_hidden(policy.model, packed(policy, nodes))
            assert_close(found.cpu().double(), truth.double(), tolerance)
