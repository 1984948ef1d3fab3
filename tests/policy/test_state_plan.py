"""Trees and batches through a recurrent layer are each of their sequences alone, and wrong plans are noticed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch

from dart_cli.hardware import accelerator
from dart_cli.policy import delta_net as product
from dart_cli.policy.delta_net import StateCache, delta_net
from dart_cli.policy.pack_plan import PackLayout
from dart_cli.policy.state_plan import NodeGroup, StatePlan, plan_layout, plan_rows
from tests.policy.delta_reference import (
    COLUMNS,
    DEEPEST,
    HIDDEN,
    drawn_layout,
    layer_alone,
    recurrence,
    small_layer,
)
from tests.policy.test_packed import InDouble

CPU = torch.device("cpu")
EXACT = 1e-11  # relative, in float64
SINGLE = 1e-5  # relative: the rule in float32, as it runs
NOTICED = 1e-4  # relative: what a wrong plan changes at least
SEEDS = range(20)

Gaps = dict[str, float]


def gap(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference relative to the largest value; infinite for another shape."""
    if mine.shape != theirs.shape:
        return float("inf")
    return float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))


def drawn(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@cache
def alone(seed: int, layout: PackLayout) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the outputs [T, H] and gradients of all paths of a layout, by the formulas."""
    layer = small_layer(seed)
    hidden = drawn((layout.length, HIDDEN), seed).requires_grad_()
    leaves = [node for node in range(len(layout.parents)) if node not in layout.parents]
    paths = [layout.path(node) for node in leaves]
    rows = torch.nn.utils.rnn.pad_sequence([hidden[path] for path in paths], batch_first=True)
    trace = layer_alone(layer, rows)
    out = torch.zeros_like(hidden)
    for row, path in enumerate(paths):  # what paths share they compute alike
        out = out.index_put((path,), trace.out[row, : len(path)])
    return out.detach(), gradients(layer, hidden, out, seed)


def gradients(
    layer: Any, hidden: torch.Tensor, out: torch.Tensor, seed: int
) -> dict[str, torch.Tensor]:
    named = {"hidden": hidden, **dict(layer.named_parameters())}
    loss = (out * drawn(out.shape, seed + 1)).sum()
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def gaps_of(seed: int, layout: PackLayout, plan: StatePlan, *, precise: bool = True) -> Gaps:
    """Return how far outputs and gradients by a plan are from those of each path alone."""
    layer = small_layer(seed)
    hidden = drawn((layout.length, HIDDEN), seed).requires_grad_()
    with InDouble() if precise else nullcontext():
        out = delta_net(layer, hidden, plan)
    mine, theirs = gradients(layer, hidden, out, seed), alone(seed, layout)[1]
    return {name: gap(mine[name], theirs[name]) for name in theirs} | {
        "out": gap(out.detach(), alone(seed, layout)[0])
    }


def right_plan(layout: PackLayout) -> StatePlan:
    return plan_layout(layout, COLUMNS, CPU)


def test_the_drawn_trees_are_awkward() -> None:
    """So that what the next test shows is worth something."""
    layouts = [drawn_layout(seed) for seed in SEEDS]
    depths = [
        [len(layout.ancestors(node)) for node in range(len(layout.parents))] for layout in layouts
    ]
    lengths = [[end - start for start, end in pairwise(layout.starts)] for layout in layouts]
    assert max(map(max, depths)) == DEEPEST - 1
    assert max(layout.parents.count(-1) for layout in layouts) > 2
    children = [
        (own[layout.parents[node]], own[node])
        for layout, own in zip(layouts, lengths, strict=True)
        for node in range(len(own))
        if layout.parents[node] >= 0
    ]
    assert {(1, 1), (1, 64), (64, 1)} <= set(children)
    assert sum(start % 64 > 0 for layout in layouts for start in layout.starts) > 100


@pytest.mark.parametrize("seed", SEEDS)
def test_trees_are_each_path_alone(seed: int) -> None:
    layout = drawn_layout(seed)
    assert max(gaps_of(seed, layout, right_plan(layout)).values()) < EXACT


def test_trees_in_float32_are_each_path_alone_up_to_its_rounding() -> None:
    for seed in range(6):
        layout = drawn_layout(seed)
        plan = right_plan(layout)
        assert max(gaps_of(seed, layout, plan, precise=False).values()) < SINGLE


# --- wrong plans of trees -------------------------------------------------------------------------

# Two trees. The first one's root has two children, each with a child; the other's has one.
TREES = PackLayout((0, 40, 75, 141, 150, 152, 162, 163, 170), (-1, 0, 0, 1, 2, -1, 5, 6))


def mixed(layout: PackLayout, states: Sequence[int], inputs: Sequence[int]) -> StatePlan:
    """Return a plan whose nodes take states from the parents `states`, and inputs from `inputs`."""
    plan = right_plan(PackLayout(layout.starts, tuple(states)))
    other = right_plan(PackLayout(layout.starts, tuple(inputs)))
    before = {
        int(tokens[0]): rows[:COLUMNS]
        for groups in other.depths
        for group in groups
        for tokens, rows in zip(group.tokens, group.inputs, strict=True)
    }

    def changed(group: NodeGroup) -> NodeGroup:
        first = torch.stack([before[int(tokens[0])] for tokens in group.tokens])
        return replace(group, inputs=torch.cat([first, group.inputs[:, COLUMNS:]], 1))

    return replace(
        plan, depths=tuple(tuple(changed(each) for each in groups) for groups in plan.depths)
    )


WRONG_PARENTS: dict[str, tuple[int, int]] = {  # a node, and what it takes for its parent
    "nothing": (3, -1),
    "its sibling": (2, 1),
    "its parent's sibling": (4, 1),
    "its grandparent": (3, 0),
    "another tree": (6, 2),
    "another tree's root": (6, 0),
    "a node of one token's parent": (7, 5),
}
WRONG_ROOTS = {"the tree before it": (5, 4)}


@pytest.mark.parametrize("part", ["states", "inputs"])
@pytest.mark.parametrize("name", [*WRONG_PARENTS, *WRONG_ROOTS])
def test_a_node_that_begins_from_another_one_is_noticed(name: str, part: str) -> None:
    node, wrong = (WRONG_PARENTS | WRONG_ROOTS)[name]
    parents = list(TREES.parents)
    parents[node] = wrong
    args = (parents, TREES.parents) if part == "states" else (TREES.parents, parents)
    assert gaps_of(0, TREES, mixed(TREES, TREES.parents, TREES.parents))["out"] < EXACT
    gaps = gaps_of(0, TREES, mixed(TREES, *args))
    assert gaps["out"] > NOTICED
    assert gaps["hidden"] > NOTICED


@pytest.mark.parametrize("seed", SEEDS)
def test_one_wrong_parent_in_any_tree_is_noticed(seed: int) -> None:
    layout, dice = drawn_layout(seed), Random(seed)
    node = dice.randrange(1, len(layout.parents))
    parents = list(layout.parents)
    parents[node] = dice.choice([each for each in range(-1, node) if each != parents[node]])
    assert gaps_of(seed, layout, mixed(layout, parents, layout.parents))["out"] > NOTICED
    assert gaps_of(seed, layout, mixed(layout, layout.parents, parents))["out"] > NOTICED


def test_padding_that_changes_a_state_is_noticed() -> None:
    plan = right_plan(TREES)

    def padded(group: NodeGroup) -> NodeGroup:
        return replace(group, tokens=group.tokens.where(group.tokens < TREES.length, 0))

    wrong = replace(plan, depths=tuple(tuple(map(padded, groups)) for groups in plan.depths))
    assert any(
        bool((group.tokens == TREES.length).any()) for groups in plan.depths for group in groups
    )
    assert gaps_of(0, TREES, wrong)["out"] > NOTICED


@pytest.mark.parametrize("place", [0, 1])
def test_a_gradient_that_stops_at_a_cut_is_noticed(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values stay right where a state or its gradient is detached; only gradients tell."""
    rule, convolved = product._chunked, product._convolved
    if place == 0:
        monkeypatch.setattr(
            product,
            "_chunked",
            lambda q, k, v, g, b, begin, n: rule(
                q, k, v, g, b, None if begin is None else begin.detach(), n
            ),
        )
    else:

        def cut(layer: Any, rows: torch.Tensor, inputs: torch.Tensor) -> Any:
            own = torch.cat([rows.detach(), rows])
            shifted = inputs + len(rows)
            shifted[:, :COLUMNS] = inputs[:, :COLUMNS]
            return convolved(layer, own, shifted)

        monkeypatch.setattr(product, "_convolved", cut)
    gaps = gaps_of(0, TREES, right_plan(TREES))
    assert gaps["out"] < EXACT
    assert gaps["hidden"] > NOTICED


# --- batches whose rows go on ---------------------------------------------------------------------

Change = Callable[[StatePlan], StatePlan]


def keep(plan: StatePlan) -> StatePlan:
    return plan


def gaps_of_rows(
    seed: int, parts: int, change: Change = keep, *, go_on: bool = True
) -> tuple[float, float, float]:
    """Return the largest gaps of outputs, states and inputs of a batch that is computed in parts.

    The rows have different lengths; each gets a drawn share of its tokens in every part, and its last three
    one by one. Some rows are cut within a part.
    """
    dice = Random(seed)
    layer = small_layer(seed)
    lengths = [dice.choice([7, 30, 64, 70, 131, 200]) for _ in range(4)]
    shares = [shared(dice, length - 3, parts) for length in lengths]
    shares = [[*own, 1, 1, 1] for own in shares]
    hidden = drawn((4, max(lengths), HIDDEN), seed)
    with torch.no_grad():
        truth = layer_alone(layer, hidden)
    cache = StateCache()
    at = [0] * len(lengths)
    worst = [0.0, 0.0, 0.0]
    for part in range(parts + 3):
        counts = [own[part] for own in shares]
        width = max(counts) + (dice.randint(0, 2) if part < parts else 0)
        cuts = [
            sorted(dice.sample(range(width - count + 1, width), min(dice.randint(0, 2), count - 1)))
            for count in counts
        ]
        batch = drawn((4, width, HIDDEN), seed + 99)  # padding has values, which nothing may see
        mask = torch.zeros(4, width, dtype=torch.long)
        for row, count in enumerate(counts):
            mask[row, width - count :] = 1
            batch[row, width - count :] = hidden[row, at[row] : at[row] + count]
        plan = plan_rows(mask, COLUMNS, CPU, cuts=cuts, continues=part > 0 and go_on)
        assert plan.single == (width == 1)
        if part > 0 and not go_on:
            cache = StateCache()
        with torch.no_grad(), InDouble():
            out = delta_net(layer, batch.flatten(0, 1), change(plan), cache).view(batch.shape)
        assert cache.kept is not None
        node = -1
        last = []
        for row, count in enumerate(counts):
            begin = at[row]
            at[row] += count
            mine, theirs = out[row, width - count :], truth.out[row, begin : at[row]]
            worst[0] = max(worst[0], gap(mine, theirs))
            for end in [begin + cut - (width - count) for cut in cuts[row]] + [at[row]]:
                node += 1
                inputs = torch.nn.functional.pad(truth.inputs[row, :end], (0, 0, COLUMNS, 0))
                worst[1] = max(worst[1], gap(cache.kept.states[node], truth.states[row, end - 1]))
                worst[2] = max(worst[2], gap(cache.kept.inputs[node], inputs[-COLUMNS:]))
            last.append(node)
        assert len(cache.kept.states) == node + 1
        cache.batch_select_indices(torch.tensor(last))
    assert at == lengths
    return worst[0], worst[1], worst[2]


def shared(dice: Random, total: int, parts: int) -> list[int]:
    """Return `total` in so many parts of at least one."""
    bounds = [0, *sorted(dice.sample(range(1, total), parts - 1)), total]
    return [end - start for start, end in pairwise(bounds)]


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_a_batch_that_goes_on_is_the_whole(seed: int, parts: int) -> None:
    """Compare outputs, and the states and inputs that each row leaves at every cut and end."""
    assert max(gaps_of_rows(seed, parts)) < EXACT


WRONG_ENDS: dict[str, Change] = {
    "states in the order of the groups": lambda plan: replace(
        plan, nodes=torch.arange(len(plan.nodes))
    ),
    "states of the row before": lambda plan: replace(plan, nodes=plan.nodes.roll(1)),
    "inputs one token early": lambda plan: replace(
        plan, ends=torch.where(plan.ends > 0, plan.ends - 1, 0)
    ),
    "inputs of the row before": lambda plan: replace(plan, ends=plan.ends.roll(1, 0)),
}


@pytest.mark.parametrize("name", WRONG_ENDS)
def test_a_batch_that_leaves_the_wrong_states_is_noticed(name: str) -> None:
    out, states, inputs = gaps_of_rows(1, 2, WRONG_ENDS[name])
    assert out > NOTICED  # of the next part
    assert (states if "states" in name else inputs) > NOTICED


def test_a_batch_that_begins_again_is_noticed() -> None:
    assert min(gaps_of_rows(1, 2, go_on=False)) > NOTICED


def test_rows_without_padding_between_them_see_nothing_of_one_another() -> None:
    """Change one row: no other row's output, state or inputs may change by a bit."""
    layer = small_layer(3)
    hidden = drawn((3, 70, HIDDEN), 3)
    plan = plan_rows(torch.ones(3, 70, dtype=torch.long), COLUMNS, CPU)
    results = []
    for changed in (hidden, torch.cat([hidden[:1], hidden[1:2] + 1.0, hidden[2:]])):
        cache = StateCache()
        with torch.no_grad():
            out = delta_net(layer, changed.flatten(0, 1), plan, cache).view(hidden.shape)
        assert cache.kept is not None
        results.append((out, cache.kept.states, cache.kept.inputs))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one[[0, 2]], other[[0, 2]])
        assert not torch.equal(one[1], other[1])


# --- the kernel of a GPU --------------------------------------------------------------------------


def chunk_by_definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What flash-linear-attention 0.6 documents: sequences behind one another, a state for each."""
    assert output_final_state
    assert use_qk_l2norm_in_kernel
    assert len(q) == 1
    assert cu_seqlens.dtype == torch.long
    assert cu_seqlens[-1] == q.shape[1]
    outputs, ends = [], []
    for row, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        assert start < end
        state = q.new_zeros(1, v.shape[2], q.shape[3], v.shape[3])
        if initial_state is not None:
            assert len(initial_state) == len(cu_seqlens) - 1
            state = initial_state[row : row + 1]
        own = [each[:, start:end] for each in (q, k, v, g, beta)]
        out, states = recurrence(*own, state)
        outputs.append(out)
        ends.append(states[:, -1])
    return torch.cat(outputs, 1), torch.cat(ends)


def recurrent_by_definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert output_final_state
    assert use_qk_l2norm_in_kernel
    out, states = recurrence(q, k, v, g, beta, initial_state)
    return out, states[:, -1]


def test_the_kernel_is_given_what_makes_it_each_path_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ModuleType("fla.ops.gated_delta_rule")
    kernels.chunk_gated_delta_rule = chunk_by_definition  # type: ignore[attr-defined]
    kernels.fused_recurrent_gated_delta_rule = recurrent_by_definition  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(accelerator, "takes_packs", lambda _device, _dtype: True)
    for seed in range(4):
        layout = drawn_layout(seed)
        assert max(gaps_of(seed, layout, right_plan(layout)).values()) < EXACT
    assert max(gaps_of_rows(2, 2)) < EXACT
