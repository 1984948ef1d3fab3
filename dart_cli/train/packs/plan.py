"""Which tokens a rank computes in which forward pass; pure, no torch.

    plan          sequences -> the packs of each rank, of at most `pack_tokens` tokens; equally many for all
    Costs         the cost of a token, of a pair of tokens and of an image's token
    Node          tokens that several sequences of a pack may share
    PlannedPack   nodes of token trees, and where each of its sequences ends

Sequences have common prefixes: the trajectories of a group begin with the same screen, and a chain that
begins where history dropped screens still has the instruction. So they form tries, whose nodes are
computed once:

1. A node is a run of tokens that all sequences of a branch share. A branch begins where they differ, but
   no node is shorter than LEAST_SHARED tokens, since a node costs a copy of the keys before it.
2. Neighbouring sequences that share much make an item, up to the size of a pack and a part of a rank's work.
3. Items go into packs, the most expensive item first. On one rank an item goes where it adds least to the
   total cost; on several ranks, where the pack is then least expensive (longest processing time first). A
   node that two packs need is in both. A sequence longer than `pack_tokens` has a pack alone.
4. Packs are dealt to ranks in rows of similar cost, since ranks wait for each other at every pack.
   If there are too few packs, a filler computes the cheapest sequence and scores nothing.

The plan is deterministic: the same sequences give the same packs.

Axis `[L]`: tokens of a sequence as uint32; ids of images' tokens are IMAGE and more, one for each image.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint32]

IMAGE = 1 << 31
"""Added to an image's index to make an id; no token id is that large."""
LEAST_SHARED = 16
"""Sequences get a common node only if they share at least this many tokens."""
WORTH_SHARING = 0.25
"""A sequence joins its neighbours' item if they have at least this share of its tokens."""
PARTS_OF_A_RANK = 4
"""An item is at most one in this many parts of a rank's work, so that ranks can be balanced."""


@dataclass(frozen=True)
class Costs:
    """Floating-point operations of a forward pass, or anything proportional to them."""

    token: float  # of one token in all layers but attention
    pair: float  # of attention, for a token and one that it attends to
    image_token: float = 0.0  # of the vision tower, for each placeholder


@dataclass(frozen=True)
class Node:
    """Tokens [begin, end) of a sequence; its ancestors hold the tokens [0, begin)."""

    parent: int  # index into the pack's nodes, less than its own; -1 for a root
    sequence: int  # a sequence that has these tokens, one of all that share them
    begin: int
    end: int


@dataclass(frozen=True)
class PlannedPack:
    """Nodes that are computed in one forward pass."""

    nodes: tuple[Node, ...]
    ends: tuple[tuple[int, int], ...]  # (sequence, node in which its path ends), by sequence
    cost: float

    @property
    def tokens(self) -> int:
        """The number of tokens that are computed."""
        return sum(node.end - node.begin for node in self.nodes)


def plan(
    sequences: Sequence[Tokens], *, pack_tokens: int, costs: Costs, ranks: int = 1
) -> list[list[PlannedPack]]:
    """Return the packs of each rank, equally many for all; each sequence [L] ends in exactly one of them.

    No sequence may be empty. Without sequences there are no packs.
    """
    if not sequences:
        return [[] for _ in range(ranks)]
    trie = _Trie(sequences, costs)
    most = trie.total / (PARTS_OF_A_RANK * ranks) if ranks > 1 else float("inf")
    items = _items(trie, pack_tokens, most)
    bins = _place(trie, items, pack_tokens) or []
    if ranks > 1:
        count = -(-len(bins) // ranks) * ranks
        while (spread := _place(trie, items, pack_tokens, count)) is None:
            count += ranks
        bins = spread
    packs = [trie.pack(item.sequences) for item in bins if item.sequences]
    filler = trie.filler()
    packs += [filler] * (-len(packs) % ranks)
    return _deal(packs, ranks)


# --- tries --------------------------------------------------------------------------------------


class _Trie:
    """A trie of all sequences: each shared prefix is a node. Nodes come before their children."""

    def __init__(self, sequences: Sequence[Tokens], costs: Costs) -> None:
        # Big-endian bytes have the same order as the tokens.
        self.order = sorted(
            range(len(sequences)),
            key=lambda index: (sequences[index].astype(">u4").tobytes(), index),
        )
        self.nodes: list[Node] = []
        self.ends = [-1] * len(sequences)  # by sequence: the node in which it ends
        self._grow(sequences)
        self.sizes = [node.end - node.begin for node in self.nodes]
        self.costs = [_cost(node, sequences[node.sequence], costs) for node in self.nodes]
        self.total = sum(self.costs)
        self._paths: list[tuple[int, ...]] = []
        for index, node in enumerate(self.nodes):
            before = self._paths[node.parent] if node.parent >= 0 else ()
            self._paths.append((*before, index))

    def path(self, sequence: int) -> tuple[int, ...]:
        """Return the nodes of a sequence, from the root."""
        return self._paths[self.ends[sequence]]

    def pack(self, sequences: Iterable[int]) -> PlannedPack:
        """Return a pack with the nodes of some sequences; a node with a single child is joined with it."""
        sequences = sorted(sequences)
        whose: dict[int, int] = {}  # node -> the longest of these sequences that goes through it
        for sequence in sorted(sequences, key=lambda index: self.nodes[self.ends[index]].end):
            whose.update(dict.fromkeys(self.path(sequence), sequence))
        children: dict[int, list[int]] = {}
        for index in sorted(whose):
            children.setdefault(self.nodes[index].parent, []).append(index)
        nodes: list[Node] = []
        place: dict[int, int] = {}  # node of the trie -> node of the pack
        for index in sorted(whose):
            node = self.nodes[index]
            if node.parent >= 0 and len(children[node.parent]) == 1:
                place[index] = place[node.parent]
                above = nodes[place[index]]
                nodes[place[index]] = Node(above.parent, whose[index], above.begin, node.end)
            else:
                place[index] = len(nodes)
                parent = place[node.parent] if node.parent >= 0 else -1
                nodes.append(Node(parent, whose[index], node.begin, node.end))
        ends = tuple((sequence, place[self.ends[sequence]]) for sequence in sequences)
        return PlannedPack(tuple(nodes), ends, sum(self.costs[index] for index in whose))

    def filler(self) -> PlannedPack:
        """Return a pack that computes the cheapest sequence and scores nothing."""
        cheapest = min(
            self.order,
            key=lambda index: (sum(self.costs[node] for node in self.path(index)), index),
        )
        return PlannedPack(self.pack([cheapest]).nodes, (), 0.0)

    def _grow(self, sequences: Sequence[Tokens]) -> None:
        """Make the nodes of the trie, each before its children."""
        ordered = [sequences[index] for index in self.order]
        shared = [_shared(one, other) for one, other in pairwise(ordered)]

        def runs(low: int, high: int, depth: int) -> list[tuple[int, int]]:
            """Return the runs of neighbours in [low, high) that share enough tokens beyond `depth`."""
            cuts = [i + 1 for i in range(low, high - 1) if shared[i] < depth + LEAST_SHARED]
            return list(pairwise([low, *cuts, high]))

        waiting = [(*run, 0, -1) for run in reversed(runs(0, len(ordered), 0))]
        while waiting:
            low, high, begin, parent = waiting.pop()
            end = min(shared[low : high - 1], default=len(ordered[low]))
            here = len(self.nodes)
            self.nodes.append(Node(parent, self.order[low], begin, end))
            while low < high and len(ordered[low]) == end:
                self.ends[self.order[low]] = here
                low += 1
            if low < high:
                waiting += [(*run, end, here) for run in reversed(runs(low, high, end))]


def _shared(one: Tokens, other: Tokens) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


def _cost(node: Node, tokens: Tokens, costs: Costs) -> float:
    """Return the cost of computing the tokens of a node, whose ancestors are computed."""
    pairs = (node.end * (node.end + 1) - node.begin * (node.begin + 1)) / 2
    images = int((tokens[node.begin : node.end] >= IMAGE).sum())
    return costs.token * (node.end - node.begin) + costs.pair * pairs + costs.image_token * images


# --- items into packs ---------------------------------------------------------------------------


class _Bin:
    """Sequences that are computed together, with the nodes that they need."""

    def __init__(self) -> None:
        self.sequences: list[int] = []
        self.nodes: set[int] = set()
        self.tokens = 0
        self.cost = 0.0

    def added(self, trie: _Trie, nodes: Iterable[int]) -> tuple[int, float]:
        """Return (tokens, cost) that these nodes would add."""
        new = [node for node in nodes if node not in self.nodes]
        return sum(trie.sizes[node] for node in new), sum(trie.costs[node] for node in new)

    def take(self, trie: _Trie, sequences: Iterable[int], nodes: Iterable[int]) -> None:
        """Add sequences and their nodes."""
        nodes = list(nodes)
        tokens, cost = self.added(trie, nodes)
        self.sequences += sequences
        self.nodes.update(nodes)
        self.tokens += tokens
        self.cost += cost

    def has_room(self, tokens: int, pack_tokens: int) -> bool:
        """Return True if `tokens` more tokens fit. An empty bin takes any number."""
        return not self.sequences or self.tokens + tokens <= pack_tokens


def _items(trie: _Trie, pack_tokens: int, most: float) -> list[_Bin]:
    """Return items of neighbours that share much, each of a cost up to `most`; the costliest first."""
    items = [_Bin()]
    for sequence in trie.order:
        path, item = trie.path(sequence), items[-1]
        tokens, cost = item.added(trie, path)
        length = sum(trie.sizes[node] for node in path)
        is_near = length - tokens >= WORTH_SHARING * length and item.cost + cost <= most
        if item.sequences and not (is_near and item.has_room(tokens, pack_tokens)):
            items.append(_Bin())
        items[-1].take(trie, [sequence], path)
    return sorted(items, key=lambda item: -item.cost)


def _place(
    trie: _Trie, items: Sequence[_Bin], pack_tokens: int, count: int = 0
) -> list[_Bin] | None:
    """Return the items in packs: each where it adds least, or (with a `count`) in packs of similar cost.

    Return None if `count` packs cannot hold them.
    """
    bins = [_Bin() for _ in range(count)]
    for item in items:
        best, least = None, float("inf")
        for candidate in bins:
            tokens, cost = candidate.added(trie, item.nodes)
            cost += candidate.cost if count else 0.0
            if candidate.has_room(tokens, pack_tokens) and cost < least:
                best, least = candidate, cost
        if best is None:
            if count:
                return None
            best = _Bin()
            bins.append(best)
        best.take(trie, item.sequences, item.nodes)
    return bins


def _deal(packs: Sequence[PlannedPack], ranks: int) -> list[list[PlannedPack]]:
    """Return the packs of each rank. Each row of `ranks` packs has similar costs.

    Within a row, the rank with the least work so far gets the costliest pack.
    """
    ordered = sorted(packs, key=lambda pack: -pack.cost) if ranks > 1 else packs
    by_rank: list[list[PlannedPack]] = [[] for _ in range(ranks)]
    costs = [0.0] * ranks
    for start in range(0, len(ordered), ranks):
        row = ordered[start : start + ranks]
        for pack, rank in zip(row, sorted(range(ranks), key=lambda rank: costs[rank]), strict=True):
            by_rank[rank].append(pack)
            costs[rank] += pack.cost
    return by_rank
