"""Models of class qwen3_5 are transformers' own: packs, batches, and published shapes cut down."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5

from bus.errors import MissingPartError, ModelError
from dart_cli.config import devices
from dart_cli.hardware import accelerator
from dart_cli.policy import delta_net, packed
from dart_cli.policy.forward import logits, rope_positions
from dart_cli.policy.images import PreparedImage
from dart_cli.policy.loader import LoadedPolicy, load_policy
from dart_cli.policy.pack_plan import PackLayout
from dart_cli.policy.packed import packed_hidden
from dart_cli.policy.state_plan import StatePlan, StateShape, plan_layout
from scripts.small_models import FAMILIES, build
from tests.policy.test_packed import (
    InDouble,
    Node,
    assert_close,
    forest,
    gradients,
    images_of,
    path_of,
    read_out,
    screen,
    text,
    tokens_of,
)
from tests.policy.test_packed import packed as packed_inputs

Family = Callable[[str], Path]

CLASS = "qwen3_5"


def library_model(folder: Path) -> PreTrainedModel:
    """Return transformers' model of a folder, which dart has not touched."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def by_library(
    model: PreTrainedModel, policy: LoadedPolicy, parts: list[int | PreparedImage]
) -> torch.Tensor:
    """Return transformers' hidden states [L, H] of one sequence with its screens."""
    tokens = torch.tensor([tokens_of(policy, parts)])
    images = images_of(parts)
    arguments: dict[str, Any] = {}
    if images:
        arguments = {
            "pixel_values": torch.cat([image.patches for image in images]).to(model.dtype),
            "image_grid_thw": torch.tensor([image.grid for image in images]),
        }
    inner: Any = model.model
    output = inner(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        mm_token_type_ids=(tokens == policy.image_token_id).int(),
        use_cache=False,
        **arguments,
    )
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


def long_forest(policy: LoadedPolicy) -> list[Node]:
    """Return `forest` with a chain behind it whose nodes begin within chunks of the rule."""
    draw = Random(8)
    nodes = forest(policy)
    count = len(nodes)
    return [
        *nodes,
        Node(-1, tuple(text(draw, 70))),
        Node(count, (screen(policy, 4, 112, 84), *text(draw, 61))),
        Node(count + 1, tuple(text(draw, 1))),
        Node(count + 2, tuple(text(draw, 66))),
    ]


def both(
    family: Family, *, precise: bool
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return hidden states of all nodes and gradients, by a pack and by transformers on each path."""
    folder = family(CLASS)
    policy, plain = load_policy(folder), library_model(folder)
    if precise:
        policy.model.double()
        plain.double()
    nodes = long_forest(policy)
    inputs = packed_inputs(policy, nodes)
    mine = packed_hidden(policy.model, inputs)
    bounds = list(pairwise(inputs.layout.starts))
    targets = [inputs.input_ids[start:end] % mine.shape[1] for start, end in bounds]
    torch.stack(
        [
            read_out(mine[start:end], targets[index], index)
            for index, (start, end) in enumerate(bounds)
        ]
    ).sum().backward()
    theirs: list[torch.Tensor] = []
    for index, (start, end) in enumerate(bounds):
        theirs.append(by_library(plain, policy, path_of(nodes, index))[start - end :])
        read_out(theirs[-1], targets[index], index).backward()
    library = {
        name: parameter.grad
        for name, parameter in plain.named_parameters()
        if parameter.grad is not None
    }
    return mine.detach(), torch.cat(theirs).detach(), gradients(policy), library


@pytest.mark.parametrize(("precise", "close"), [(True, 1e-9), (False, 3e-5)])
def test_a_pack_of_the_whole_model_is_transformers_on_each_path(
    precise: bool, close: float, family: Family
) -> None:
    if precise:
        with InDouble():
            mine, theirs, gradient, library = both(family, precise=True)
    else:
        mine, theirs, gradient, library = both(family, precise=False)
    assert_close(mine, theirs, close)
    assert gradient.keys() == library.keys()
    assert any("A_log" in name for name in gradient)
    for name, each in gradient.items():
        assert_close(each, library[name], 10 * close)


@pytest.mark.parametrize("node", [2, 4, 11])
def test_a_model_whose_node_begins_from_another_one_is_noticed(
    node: int, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recurrent layers alone get the wrong plan; attention and positions stay right."""
    policy = load_policy(family(CLASS))
    inputs = packed_inputs(policy, long_forest(policy))

    def wrong(layout: PackLayout, columns: int, device: torch.device) -> StatePlan:
        parents = list(layout.parents)
        parents[node] = -1
        return plan_layout(PackLayout(layout.starts, tuple(parents)), columns, device)

    with torch.no_grad():
        right = packed_hidden(policy.model, inputs)
        monkeypatch.setattr(packed, "plan_layout", wrong)
        found = packed_hidden(policy.model, inputs)
    start, end = inputs.layout.starts[node : node + 2]
    torch.testing.assert_close(found[:start], right[:start], rtol=0, atol=1e-4)
    assert float((found[start:end] - right[start:end]).abs().max()) > 1e-2


def test_a_model_whose_recurrent_layers_take_no_packs_is_refused(family: Family) -> None:
    """transformers would pass the layout on, and its layers pass states from one sequence to another."""
    policy = load_policy(family(CLASS))
    inner: Any = policy.model.model
    del inner.language_model.layers[2].linear_attn.forward
    with pytest.raises(ModelError, match="recurrent layers are transformers' own, which cannot"):
        packed_hidden(policy.model, packed_inputs(policy, forest(policy)))


# --- the rule -------------------------------------------------------------------------------------


def rule_inputs(length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return query, key, value, decay, beta and begin of two sequences in four heads."""
    draw = torch.Generator().manual_seed(length)
    query, key, value = (
        torch.randn(2, length, 4, width, generator=draw).to(dtype) for width in (16, 16, 8)
    )
    decay, beta = (torch.rand(2, length, 4, generator=draw) for _ in range(2))
    return [query, key, value, -decay, beta.to(dtype), torch.randn(2, 4, 16, 8, generator=draw)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 64, 150])
@pytest.mark.parametrize("starts", [False, True])
def test_the_rule_is_transformers_own(length: int, dtype: torch.dtype, starts: bool) -> None:
    *inputs, begin = rule_inputs(length, dtype)
    mine = delta_net._chunked(*inputs, begin if starts else None, torch.tensor([length] * 2))
    query, key, value, decay, beta = inputs
    names = ["torch_chunk_gated_delta_rule"]
    results = [mine]
    if length == 1 and starts:
        names += ["torch_recurrent_gated_delta_rule"]
        results += [delta_net.rule_of_one_token(*inputs, begin)]
    for name, result in zip(names, results, strict=True):
        theirs = inspect.unwrap(getattr(modeling_qwen3_5, name))(
            query,
            key,
            value,
            g=decay,
            beta=beta,
            initial_state=begin if starts else None,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        for one, other in zip(result, theirs, strict=True):
            assert one.dtype == other.dtype
            assert_close(one.float(), other.float(), 2e-6 if dtype == torch.float32 else 4e-3)


class Elements(TorchDispatchMode):
    """The elements that all operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves(result)
        self.count += sum(each.numel() for each in leaves if isinstance(each, torch.Tensor))
        return result


def test_the_backward_pass_of_the_rule_is_linear_in_the_tokens() -> None:
    """transformers' function makes whole gradients for each chunk: twice the tokens, four times the work."""
    counts = []
    for length in (1024, 2048):
        inputs = [each.requires_grad_() for each in rule_inputs(length, torch.float32)]
        core, last = delta_net._chunked(*inputs, torch.tensor([length] * 2))
        with Elements() as elements:
            torch.autograd.grad(core.sum() + last.sum(), inputs)
        counts.append(elements.count)
    assert counts[1] < 2.2 * counts[0]


# --- published shapes, cut down -------------------------------------------------------------------

PUBLISHED: dict[str, dict[str, Any]] = {
    # Key heads are 16 in all; heads of attention have 256 values, those of DeltaNet layers 128.
    "0.8B": {"tied": True, "hidden": 1024, "mlp": 3584, "heads": (8, 2), "values": 16},
    "2B": {"tied": True, "hidden": 2048, "mlp": 6144, "heads": (8, 2), "values": 16},
    "4B": {"tied": True, "hidden": 2560, "mlp": 9216, "heads": (16, 4), "values": 32},
    "9B": {"tied": False, "hidden": 4096, "mlp": 12288, "heads": (16, 4), "values": 32},
    "27B": {"tied": False, "hidden": 5120, "mlp": 17408, "heads": (24, 4), "values": 48},
}
CUT = 32  # of the width
KEY_HEADS = 2


def cut_down(name: str, folder: Path, *, by_interval: bool) -> Path:
    """Write a random folder with the ratios, head widths and rotary of a published one."""
    shape, small = PUBLISHED[name], FAMILIES[CLASS].config
    heads, kv_heads = shape["heads"]
    layers = 8 if name == "27B" else 4
    config = {
        "text_config": {
            **small["text_config"],
            "hidden_size": shape["hidden"] // CUT,
            "intermediate_size": shape["mlp"] // CUT,
            "num_hidden_layers": layers,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
            "num_attention_heads": heads // kv_heads,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "linear_num_key_heads": KEY_HEADS,
            "linear_num_value_heads": shape["values"] * KEY_HEADS // 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "rope_parameters": {
                **small["text_config"]["rope_parameters"],
                "mrope_section": [11, 11, 10],
            },
        },
        "vision_config": {
            **small["vision_config"],
            "out_hidden_size": shape["hidden"] // CUT,
        },
    }
    if by_interval:  # as in some published files
        del config["text_config"]["layer_types"]
    return build(CLASS, folder, tied=shape["tied"], sizes=config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_shape_is_transformers_whole_model(name: str, tmp_path: Path) -> None:
    """A batch of prompts with none, one and two screens, and the same prompts as a pack."""
    folder = cut_down(name, tmp_path, by_interval=name in ("2B", "27B"))
    policy, plain = load_policy(folder), library_model(folder)
    shape = StateShape.of(policy.model)
    assert shape is not None
    assert shape.heads == PUBLISHED[name]["values"] // 8
    assert (shape.key, shape.value, shape.columns) == (128, 128, 3)
    assert len(shape.layers) == 3 * len(policy.model.model.language_model.layers) // 4
    tree = json.loads((folder / "config.json").read_text())
    assert ("layer_types" in tree["text_config"]) == (name not in ("2B", "27B"))
    head: Any = policy.model.get_output_embeddings()
    embedding: Any = policy.model.get_input_embeddings()
    assert (head.weight is embedding.weight) == PUBLISHED[name]["tied"]
    nodes = [node for node in forest(policy) if node.parent < 0]
    sequences = [list(node.parts) for node in nodes]
    inputs = policy.inputs_of(
        [tokens_of(policy, parts) for parts in sequences], [images_of(parts) for parts in sequences]
    )
    pack = packed_inputs(policy, nodes)
    with torch.no_grad():
        batch = logits(policy.model, inputs, last=inputs.input_ids.shape[1])
        together = packed_hidden(policy.model, pack)
        for row, (parts, (start, end)) in enumerate(
            zip(sequences, pairwise(pack.layout.starts), strict=True)
        ):
            hidden = by_library(plain, policy, parts)
            assert_close(together[start:end], hidden, 3e-5)
            their_head: Any = plain.get_output_embeddings()
            assert_close(batch[row, -len(hidden) :], their_head(hidden), 3e-5)


def test_positions_of_several_screens_are_the_librarys(family: Family) -> None:
    """Compare screens at the beginning and the end, wide, high and twice the same one."""
    policy = load_policy(family(CLASS))
    inner: Any = library_model(family(CLASS)).model
    one, two, three = (
        screen(policy, 1, 448, 64),
        screen(policy, 2, 64, 320),
        screen(policy, 3, 320, 320),
    )
    for parts in (
        [one, 19, two, 20, three, 21, 22],
        [20, one, 21, two, 22, one],
        [20, three, 21, three, 21, *range(30, 80), two],
        [one],
        [20, 21, 22],
    ):
        tokens = tokens_of(policy, parts)
        grids = [image.grid for image in images_of(parts)]
        mine, following = rope_positions(tokens, grids, policy.image_token_id, 2)
        ids = torch.tensor([tokens])
        theirs, delta = inner.get_rope_index(
            ids,
            (ids == policy.image_token_id).int(),
            image_grid_thw=torch.tensor(grids) if grids else None,
        )
        assert torch.equal(mine, theirs[:, 0])
        assert following == len(tokens) + int(delta)


# --- a GPU ----------------------------------------------------------------------------------------


def test_a_gpu_without_the_kernel_is_refused_with_what_to_install(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "is_gpu", lambda _: True)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingPartError, match=r"pip install flash-linear-attention") as caught:
        load_policy(family(CLASS), "bfloat16")
    assert "\n" not in str(caught.value)
    load_policy(family(CLASS), "float32")  # whose rule is torch's
    load_policy(family("qwen3_vl"), "bfloat16")
