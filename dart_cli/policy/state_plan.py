"""The index tables with which recurrent layers compute sequences that begin where others end.

    StateShape   the numbers that the recurrent layers of a model keep of one sequence
    StatePlan    the index tables of one forward pass, for all of its recurrent layers
    NodeGroup    nodes that a layer computes in one call
    plan_layout  makes the StatePlan of a pack: the trees of a PackLayout
    plan_rows    makes the StatePlan of a padded batch, whose rows may begin from earlier states

What a recurrent layer knows of a token's past is a state, and the last inputs of its convolution. No mask can
say what a token sees there. So the tokens are cut into nodes. A node begins with the state that its parent
left and with the last inputs on its path, and the nodes of one depth are computed together. Nodes of similar
length share a call; the shorter ones are padded on the right with tokens that change no state.

A layer gathers the inputs of its convolution from rows. Of T tokens, row t is the input of token t, and row T
is zeros. Rows from T + 1 on are inputs that earlier passes left, `columns` rows for each root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from dart_cli.policy.pack_plan import PackLayout

_RECURRENT = "linear_attention"
CALL_COST = 64  # padding tokens of a node that cost as much as one more call


class StateShape(NamedTuple):
    """The numbers that each recurrent layer of a model keeps of one sequence."""

    layers: tuple[int, ...]  # indices of the recurrent layers
    columns: int  # inputs of the convolution, before the next token
    channels: int  # of the convolution
    heads: int
    key: int  # width of a head's keys
    value: int  # width of a head's values

    @classmethod
    def of(cls, model: PreTrainedModel) -> StateShape | None:
        """Return the shape for `model`; None if it has no recurrent layers."""
        text: Any = model.config.get_text_config(decoder=True)
        kinds = getattr(text, "layer_types", None) or ()
        layers = tuple(index for index, kind in enumerate(kinds) if kind == _RECURRENT)
        if not layers:
            return None
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        values = text.linear_num_value_heads * text.linear_value_head_dim
        return cls(
            layers=layers,
            columns=text.linear_conv_kernel_dim - 1,
            channels=2 * keys + values,
            heads=text.linear_num_value_heads,
            key=text.linear_key_head_dim,
            value=text.linear_value_head_dim,
        )

    def nbytes(self, element: int) -> int:
        """Return the bytes of one sequence over all layers; an input of the convolution has `element` bytes."""
        state = self.heads * self.key * self.value * 4
        return len(self.layers) * (self.columns * self.channels * element + state)


@dataclass(frozen=True)
class NodeGroup:
    """B nodes of one depth, of which the longest has N tokens."""

    inputs: torch.Tensor  # [B, columns + N], int64, rows of the convolution's inputs
    tokens: torch.Tensor  # [B, N], int64, the tokens; T for padding
    lengths: torch.Tensor  # [B], int64
    starts: torch.Tensor  # [B], int64: whose state each begins with: a node one depth above, a root


@dataclass(frozen=True)
class StatePlan:
    """The index tables of a pass over T tokens in M nodes."""

    depths: tuple[tuple[NodeGroup, ...], ...]  # from the roots on
    # [T], the place of each token in the padded outputs of all groups; after the last one, the place
    # of a token that is in no node
    places: torch.Tensor
    nodes: torch.Tensor  # [M], the place of each node in the order of the groups
    ends: torch.Tensor  # [M, columns], the last inputs of each node, as rows

    @property
    def single(self) -> bool:
        """True if every token is a root, as when a batch decodes."""
        return self.depths[0][0].tokens.shape == (len(self.places), 1)


@dataclass(frozen=True)
class _Node:
    start: int  # its tokens are [start, end)
    end: int
    parent: int  # -1 for a root

    def __len__(self) -> int:
        return self.end - self.start


def plan_layout(layout: PackLayout, columns: int, device: torch.device) -> StatePlan:
    """Return the plan of a pack on `device`. A token of the convolution sees `columns` tokens before it."""
    bounds = pairwise(layout.starts)
    nodes = [_Node(*own, parent) for own, parent in zip(bounds, layout.parents, strict=True)]
    return _plan(nodes, layout.length, columns, device, continues=False)


def plan_rows(
    mask: torch.Tensor,
    columns: int,
    device: torch.device,
    *,
    cuts: Sequence[Sequence[int]] = (),
    continues: bool = False,
) -> StatePlan:
    """Return the plan of a batch [B, L] with a mask [B, L], which is 1 on the last tokens of each row.

    A row is cut into nodes before the columns `cuts` [B][C], ascending, so that the states there are known.
    With `continues` the rows begin from states and inputs that earlier passes left.
    """
    rows, length = mask.shape
    nodes: list[_Node] = []
    for row, count in enumerate(mask.sum(1).tolist()):
        inner = cuts[row] if cuts else ()
        bounds = [length - count, *inner, length]
        for start, end in pairwise(bounds):
            parent = -1 if start == bounds[0] else len(nodes) - 1
            nodes.append(_Node(row * length + start, row * length + end, parent))
    return _plan(nodes, rows * length, columns, device, continues=continues)


def _plan(
    nodes: Sequence[_Node], total: int, columns: int, device: torch.device, *, continues: bool
) -> StatePlan:
    """Return the plan of nodes; each parent is before its children."""
    # 1. Find the depth of each node and the inputs that come before it.
    depth: list[int] = []
    before: list[torch.Tensor] = []  # of each node, `columns` rows
    ends: list[torch.Tensor] = []
    roots: dict[int, int] = {}  # a root's number among the roots
    for index, node in enumerate(nodes):
        if node.parent >= 0:
            depth.append(depth[node.parent] + 1)
            before.append(ends[node.parent])
        else:
            first = total + 1 + len(roots) * columns
            earlier = torch.arange(first, first + columns)
            before.append(earlier if continues else torch.full((columns,), total))
            roots[index] = len(roots)
            depth.append(0)
        own = torch.arange(max(node.start, node.end - columns), node.end)
        ends.append(torch.cat([before[-1], own])[len(own) :])
    # 2. Put nodes of similar length into groups, depth by depth.
    depths: list[tuple[NodeGroup, ...]] = []
    places = torch.full((total,), -1)
    order: list[int] = []
    above: dict[int, int] = roots
    padded = 0
    for level in range(max(depth) + 1):
        members = [index for index in range(len(nodes)) if depth[index] == level]
        groups: list[NodeGroup] = []
        places_here: dict[int, int] = {}
        for group in _alike(members, nodes):
            longest = len(nodes[group[0]])
            tokens, inputs = [], []
            for row, index in enumerate(group):
                node = nodes[index]
                own = torch.arange(node.start, node.end)
                places[own] = padded + row * longest + torch.arange(len(own))
                tokens.append(F.pad(own, (0, longest - len(own)), value=total))
                inputs.append(torch.cat([before[index], tokens[-1]]))
                places_here[index] = len(places_here)
            padded += len(group) * longest
            starts = [above[index if level == 0 else nodes[index].parent] for index in group]
            groups.append(
                NodeGroup(
                    inputs=torch.stack(inputs).to(device),
                    tokens=torch.stack(tokens).to(device),
                    lengths=torch.tensor([len(nodes[index]) for index in group]).to(device),
                    starts=torch.tensor(starts).to(device),
                )
            )
            order += group
        depths.append(tuple(groups))
        above = places_here
    places[places < 0] = padded
    return StatePlan(
        depths=tuple(depths),
        places=places.to(device),
        nodes=torch.tensor(order).argsort().to(device),
        ends=torch.stack(ends).to(device),
    )


def _alike(members: Sequence[int], nodes: Sequence[_Node]) -> list[list[int]]:
    """Return `members` in groups of similar length, the longest of each first."""
    groups: list[list[int]] = []
    for index in sorted(members, key=lambda index: -len(nodes[index])):
        if groups and len(nodes[groups[-1][0]]) <= 2 * len(nodes[index]) + CALL_COST:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
