"""The index tables with which the nodes of a pack attend. They are made once and used by every layer.

    PackLayout   the nodes of a pack: the tokens of each, and its parent
    PackPlan     the index tables of a layout for one device and dtype
    plan_pack    makes the PackPlan of a PackLayout

The queries of a node attend to all keys of its ancestors and, causally, to the node's own keys. Gathering
these keys side by side makes each node an ordinary sequence with at most as many queries as keys, causal from
the bottom right. A plan has one of two forms (dart_cli/policy/packed.py):

    varlen     cumulative lengths of the sequences, for a GPU in bfloat16 or float16
    buckets    padded sequences of similar length, elsewhere

A root node needs no mask in a bucket. Other nodes are cut into pieces of QUERY_BLOCK queries. All large
pieces take their masks from one shared mask of QUERY_BLOCK queries times the keys of the longest path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from dart_cli.hardware import accelerator

QUERY_BLOCK = 512  # queries; bounds the masks in buckets
BUCKET_COST = 4096  # query-key pairs whose arithmetic costs as much as one more call
LARGE = 2**16  # query-key pairs; a piece with at least as many attends in a call by itself


@dataclass(frozen=True)
class PackLayout:
    """The nodes of one or more trees, one behind another in a pack of L tokens.

    Node i has the tokens [starts[i], starts[i+1]). Each of them sees all tokens of the node's ancestors, and
    the tokens of the node up to itself. A sequence that shares nothing is a root node. Raises ValueError if
    `starts` and `parents` are no such layout.
    """

    starts: tuple[int, ...]  # [M + 1], from 0 to L, increasing
    parents: tuple[int, ...]  # [M], an earlier node; -1 for a root

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.parents) + 1 or self.starts[0] != 0:
            raise ValueError("a pack of M nodes has M + 1 starts, the first is 0")
        if any(start >= end for start, end in pairwise(self.starts)):
            raise ValueError("every node of a pack has a token")
        if not all(-1 <= parent < index for index, parent in enumerate(self.parents)):
            raise ValueError("a node's parent comes before it")

    @property
    def length(self) -> int:
        """L, the number of tokens in the pack."""
        return self.starts[-1]

    def ancestors(self, node: int) -> tuple[int, ...]:
        """Return the ancestors of `node`, from the root down."""
        ancestors: list[int] = []
        while (node := self.parents[node]) >= 0:
            ancestors.append(node)
        return tuple(reversed(ancestors))

    def path(self, node: int) -> torch.Tensor:
        """Return the places [P] in the pack of all tokens from the root to the end of `node`, int64."""
        return torch.cat(
            [
                torch.arange(self.starts[index], self.starts[index + 1])
                for index in (*self.ancestors(node), node)
            ]
        )


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length that attend in one call."""

    count: int  # B, sequences
    queries: int  # of the longest
    keys: int  # of the longest
    bias: torch.Tensor | None  # [B, 1, queries, keys], 0 or -inf; None: causal from the top left


@dataclass(frozen=True)
class PackPlan:
    """The index tables of one pack. Either `buckets` or the cumulative lengths are set."""

    keys: torch.Tensor | None  # [K], the token of each gathered key; None: all tokens, in order
    window: int  # keys that a token sees at most, itself included; 0 for all
    queries: torch.Tensor | None = None  # [Q], the token of each padded query; None: in order
    places: torch.Tensor | None = None  # [L], the padded query of each token
    buckets: tuple[Bucket, ...] = ()
    query_ends: torch.Tensor | None = None  # [M + 1], int32, cumulative queries
    key_ends: torch.Tensor | None = None  # [M + 1], int32, cumulative keys
    longest: tuple[int, int] = (0, 0)  # most queries of a node, most keys of a node


def plan_pack(
    layout: PackLayout, device: torch.device, dtype: torch.dtype, *, window: int = 0
) -> PackPlan:
    """Return the index tables of `layout` for queries and keys of `dtype` on `device`.

    `window` is the number of keys that a token sees at most, itself included; 0 means all.
    """
    if accelerator.takes_packs(device, dtype):
        return _varlen_plan(layout, device, window)
    return _bucket_plan(layout, device, dtype, window)


def _varlen_plan(layout: PackLayout, device: torch.device, window: int) -> PackPlan:
    lengths = [end - start for start, end in pairwise(layout.starts)]
    key_counts = list(lengths)
    for node, parent in enumerate(layout.parents):
        key_counts[node] += key_counts[parent] if parent >= 0 else 0
    keys = None
    if any(parent >= 0 for parent in layout.parents):
        keys = torch.cat([layout.path(node) for node in range(len(lengths))]).to(device)
    ends = torch.tensor(key_counts).cumsum(0)
    return PackPlan(
        keys=keys,
        window=window,
        query_ends=torch.tensor(layout.starts, dtype=torch.int32).to(device),
        key_ends=F.pad(ends, (1, 0)).to(device, torch.int32),
        longest=(max(lengths), max(key_counts)),
    )


@dataclass(frozen=True)
class _Piece:
    """Consecutive queries of one node, and the keys of its path up to the last of these queries."""

    queries: torch.Tensor  # [q], places in the pack
    keys: torch.Tensor  # [k]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.keys), len(self.queries)

    @property
    def pairs(self) -> int:
        return len(self.keys) * len(self.queries)


def _bucket_plan(
    layout: PackLayout, device: torch.device, dtype: torch.dtype, window: int
) -> PackPlan:
    # 1. Cut the nodes into pieces; a root node stays whole unless its window is shorter than it is.
    roots: list[_Piece] = []
    others: list[_Piece] = []
    for node, parent in enumerate(layout.parents):
        path = layout.path(node)
        own = layout.starts[node + 1] - layout.starts[node]
        if parent < 0 and not 0 < window < own:
            roots.append(_Piece(path, path))
            continue
        for start in range(0, own, QUERY_BLOCK):
            end = len(path) - own + min(start + QUERY_BLOCK, own)
            begin = len(path) - own + start
            first = max(0, begin - window + 1) if window else 0
            others.append(_Piece(path[begin:end], path[first:end]))
    # 2. Put pieces of similar size into one bucket.
    large = [piece for piece in others if piece.pairs >= LARGE]
    small = [piece for piece in others if piece.pairs < LARGE]
    biases = _shared_biases(large, window, dtype, device)
    groups: list[tuple[list[_Piece], torch.Tensor | None]]
    groups = [(group, None) for group in _grouped(roots)]
    groups += [(group, _bias(group, window, dtype).to(device)) for group in _grouped(small)]
    groups += [([piece], bias) for piece, bias in zip(large, biases, strict=True)]
    # 3. Pad the pieces of each bucket, and note the token of each padded query and key.
    buckets: list[Bucket] = []
    queries: list[torch.Tensor] = []
    keys: list[torch.Tensor] = []
    for group, bias in groups:
        most_keys, most_queries = _most(group)
        buckets.append(Bucket(len(group), most_queries, most_keys, bias))
        for piece in group:
            # Padding repeats the first token: the output of its query is dropped, and its key is masked.
            queries.append(F.pad(piece.queries, (0, most_queries - len(piece.queries)), value=-1))
            keys.append(F.pad(piece.keys, (0, most_keys - len(piece.keys)), value=0))
    places = torch.empty(layout.length, dtype=torch.long)
    query_index = torch.cat(queries)
    real = query_index >= 0
    places[query_index[real]] = torch.arange(len(query_index))[real]
    in_order = torch.arange(layout.length)
    key_index = torch.cat(keys)
    return PackPlan(
        keys=None if torch.equal(key_index, in_order) else key_index.to(device),
        window=window,
        queries=None if torch.equal(query_index, in_order) else query_index.clamp(min=0).to(device),
        places=places.to(device),
        buckets=tuple(buckets),
    )


def _most(group: Sequence[_Piece]) -> tuple[int, int]:
    """Return the most keys and the most queries of a piece in `group`."""
    return max(len(piece.keys) for piece in group), max(len(piece.queries) for piece in group)


def _grouped(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Return `pieces` in groups of similar size, in which padding costs less than another call would."""
    groups: list[list[_Piece]] = []
    most = (0, 0)  # keys and queries of the last group
    for piece in sorted(pieces, key=lambda piece: piece.shape, reverse=True):
        wider = most[0], max(most[1], piece.shape[1])
        if groups and wider[0] * wider[1] <= 2 * piece.pairs + BUCKET_COST:
            groups[-1].append(piece)
            most = wider
        else:
            groups.append([piece])
            most = piece.shape
    return groups


def _bias(group: Sequence[_Piece], window: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the bias [B, 1, queries, keys] that hides later keys, padding and keys before the window.

    Query i of a piece of q queries and k keys sees the keys up to i + k - q. Queries that are padding see
    more.
    """
    most_keys, most_queries = _most(group)
    lengths = torch.tensor([piece.shape for piece in group])  # [B, 2]
    order = torch.arange(most_queries)[None, :, None]
    last = order + (lengths[:, 0] - lengths[:, 1])[:, None, None]
    place = torch.arange(most_keys)[None, None, :]
    hidden = place > last
    if window:
        hidden |= place <= last - window
        hidden &= order < lengths[:, 1, None, None]  # a row that sees no key would be nan
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None]


def _shared_biases(
    pieces: Sequence[_Piece], window: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Return the bias of each piece: all are lower right corners of one tensor."""
    if not pieces:
        return []
    keys, queries = _most(pieces)
    order = torch.arange(keys)
    whole = _bias([_Piece(order[:queries], order)], window, dtype).to(device)
    return [whole[..., queries - len(p.queries) :, keys - len(p.keys) :] for p in pieces]
