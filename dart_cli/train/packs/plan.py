"""Which tokens a rank computes in which forward pass; pure, no torch.

    plan          sequences -> for each rank as many packs as for any other, of at most `pack_tokens` tokens
    Costs         what a token, a pair of tokens and an image's token cost
    PlannedPack   nodes of token trees, and where each of its sequences ends

Sequences repeat each other: the trajectories of a group begin with the same screen, and a chain that
begins where history dropped screens still has the instruction. So they form tries, whose nodes are
computed once:

1. A node is a run of tokens that all sequences of a branch share; a branch begins where they differ,
   but not for a share of less than LEAST_SHARED tokens: a node costs a copy of the keys before it.
2. Neighbours that share much make an item, as long as one fits in a pack and in a part of a rank's work.
3. Items go into packs, the most expensive first: on one rank where they add least to the whole, on
   several where the pack is then least expensive (longest processing time first). A node that two
   packs need is in both. A sequence longer than `pack_tokens` has a pack alone.
4. Packs are dealt to ranks in rows of similar cost, since ranks wait for each other at every pack.
   Where there are too few, an empty pack computes the cheapest sequence and scores nothing.

All of it is deterministic: the same sequences give the same packs.

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
"""Added to an image's index: no token id is that large."""
LEAST_SHARED = 16
"""Tokens that are worth a node."""
WORTH_SHARING = 0.25
"""Share of a sequence's tokens that its neighbours have, to be kept with them."""
PARTS_OF_A_RANK = 4
"""An item is no more than this part of a rank's work, so that ranks can be balanced."""


@dataclass(frozen=True)
class Costs:
    """Floating-point operations of a forward pass, or anything proportional to them."""

    token: float  # of one token in all layers but attention
    pair: float  # of attention, for a token and one that it sees
    image_token: float = 0.0  # of the vision tower, for each placeholder


@dataclass(frozen=True)
class Node:
    """Tokens [begin, end) of a sequence, behind those of its ancestors [0, begin)."""

    parent: int  # index into the pack's nodes, less than its own; -1 for a root
    sequence: int  # whose tokens these are, one of all that share them
    begin: int
    end: int


@dataclass(frozen=True)
class PlannedPack:
    """Nodes that are computed together."""

    nodes: tuple[Node, ...]
    ends: tuple[tuple[int, int], ...]  # (sequence, node in which its path ends), by sequence
    cost: float

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return sum(node.end - node.begin for node in self.nodes)


def plan(
    sequences: Sequence[Tokens], *, pack_tokens: int, costs: Costs, ranks: int = 1
) -> list[list[PlannedPack]]:
    """Packs of each rank, the same number for all; each sequence [L] ends in exactly one of them.

    No sequence may be empty. Without sequences there are no packs.
    """
    if not sequences:
        return [[] for _ in range(ranks)]
    trie = _Trie(sequences, costs)
    most = trie.total / (PARTS_OF_A_RANK * ranks) if ranks > 1 else float("inf")
    items = _items(trie, pack_tokens, most)
    bins = _placed(trie, items, pack_tokens) or []
    if ranks > 1:
        count = -(-len(bins) // ranks) * ranks
        while (spread := _placed(trie, items, pack_tokens, count)) is None:
            count += ranks
        bins = spread
    packs = [trie.pack(each.sequences) for each in bins if each.sequences]
    filler = trie.filler()
    packs += [filler] * (-len(packs) % ranks)
    return _dealt(packs, ranks)


# --- tries --------------------------------------------------------------------------------------


class _Trie:
    """All sequences, each shared prefix once. Nodes stand before their children."""

    def __init__(self, sequences: Sequence[Tokens], costs: Costs) -> None:
        # Bytes with the most significant first are ordered as the tokens are.
        self.order = sorted(
            range(len(sequences)),
            key=lambda index: (sequences[index].astype(">u4").tobytes(), index),
        )
        self.nodes: list[Node] = []
        self.ends = [-1] * len(sequences)  # the node in which each ends
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

    def pack(self, chosen: Iterable[int]) -> PlannedPack:
        """Return the nodes of some sequences; a node with one child alone is one with it."""
        chosen = sorted(chosen)
        whose: dict[int, int] = {}  # node -> the longest of the chosen that goes through it
        for sequence in sorted(chosen, key=lambda each: self.nodes[self.ends[each]].end):
            whose.update(dict.fromkeys(self.path(sequence), sequence))
        children: dict[int, list[int]] = {}
        for index in sorted(whose):
            children.setdefault(self.nodes[index].parent, []).append(index)
        made: list[Node] = []
        place: dict[int, int] = {}  # node of the trie -> node of the pack
        for index in sorted(whose):
            node = self.nodes[index]
            if node.parent >= 0 and len(children[node.parent]) == 1:
                place[index] = place[node.parent]
                held = made[place[index]]
                made[place[index]] = Node(held.parent, whose[index], held.begin, node.end)
            else:
                place[index] = len(made)
                parent = place[node.parent] if node.parent >= 0 else -1
                made.append(Node(parent, whose[index], node.begin, node.end))
        ends = tuple((sequence, place[self.ends[sequence]]) for sequence in chosen)
        return PlannedPack(tuple(made), ends, sum(self.costs[index] for index in whose))

    def filler(self) -> PlannedPack:
        """Return the cheapest sequence, which is computed and not scored."""
        cheapest = min(
            self.order, key=lambda each: (sum(self.costs[node] for node in self.path(each)), each)
        )
        return PlannedPack(self.pack([cheapest]).nodes, (), 0.0)

    def _grow(self, sequences: Sequence[Tokens]) -> None:
        ordered = [sequences[index] for index in self.order]
        shared = [_shared(one, other) for one, other in pairwise(ordered)]

        def runs(low: int, high: int, depth: int) -> list[tuple[int, int]]:
            """Neighbours in [low, high) that share enough beyond `depth`."""
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
    """How many tokens two sequences begin with alike."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


def _cost(node: Node, tokens: Tokens, costs: Costs) -> float:
    pairs = (node.end * (node.end + 1) - node.begin * (node.begin + 1)) / 2
    images = int((tokens[node.begin : node.end] >= IMAGE).sum())
    return costs.token * (node.end - node.begin) + costs.pair * pairs + costs.image_token * images


# --- items into packs ---------------------------------------------------------------------------


class _Bin:
    """Sequences that are together, with what they need."""

    def __init__(self) -> None:
        self.sequences: list[int] = []
        self.nodes: set[int] = set()
        self.tokens = 0
        self.cost = 0.0

    def added(self, trie: _Trie, nodes: Iterable[int]) -> tuple[int, float]:
        """(tokens, cost) that these nodes would add."""
        new = [node for node in nodes if node not in self.nodes]
        return sum(trie.sizes[node] for node in new), sum(trie.costs[node] for node in new)

    def take(self, trie: _Trie, sequences: Iterable[int], nodes: Iterable[int]) -> None:
        """Hold them, too."""
        nodes = list(nodes)
        tokens, cost = self.added(trie, nodes)
        self.sequences += sequences
        self.nodes.update(nodes)
        self.tokens += tokens
        self.cost += cost

    def has_room(self, tokens: int, pack_tokens: int) -> bool:
        """Whether so many tokens more fit; in an empty one whatever comes."""
        return not self.sequences or self.tokens + tokens <= pack_tokens


def _items(trie: _Trie, pack_tokens: int, most: float) -> list[_Bin]:
    """Neighbours that share much, as long as they cost no more than `most`; the costliest first."""
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


def _placed(
    trie: _Trie, items: Sequence[_Bin], pack_tokens: int, count: int = 0
) -> list[_Bin] | None:
    """Return the items in packs: in few, each where it adds least; or in `count` packs of similar cost.

    None where `count` packs have no room for them.
    """
    bins = [_Bin() for _ in range(count)]
    for item in items:
        best, least = None, float("inf")
        for each in bins:
            tokens, cost = each.added(trie, item.nodes)
            cost += each.cost if count else 0.0
            if each.has_room(tokens, pack_tokens) and cost < least:
                best, least = each, cost
        if best is None:
            if count:
                return None
            best = _Bin()
            bins.append(best)
        best.take(trie, item.sequences, item.nodes)
    return bins


def _dealt(packs: Sequence[PlannedPack], ranks: int) -> list[list[PlannedPack]]:
    """Rows of packs of similar cost, one for each rank; within a row the most to who has least."""
    ordered = sorted(packs, key=lambda pack: -pack.cost) if ranks > 1 else packs
    dealt: list[list[PlannedPack]] = [[] for _ in range(ranks)]
    held = [0.0] * ranks
    for start in range(0, len(ordered), ranks):
        row = ordered[start : start + ranks]
        for pack, rank in zip(row, sorted(range(ranks), key=lambda rank: held[rank]), strict=True):
            dealt[rank].append(pack)
            held[rank] += pack.cost
    return dealt
