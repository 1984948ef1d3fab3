"""Promises of the plan: every sequence once, behind exactly its own tokens, within the budget, balanced."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dart_cli.train.packs.plan import IMAGE, LEAST_SHARED, Costs, PlannedPack, Tokens, plan

COSTS = Costs(token=100.0, pair=0.5, image_token=30.0)


def tokens(values: list[int]) -> Tokens:
    return np.array(values, dtype=np.uint32)


@st.composite
def batches(draw: st.DrawFn) -> list[Tokens]:
    """Return sequences that branch at random places; some are equal, some are prefixes of others."""
    sequences: list[list[int]] = []
    dice = random.Random(draw(st.integers(0, 2**32)))
    for _ in range(draw(st.integers(1, 14))):
        base = dice.choice(sequences) if sequences and dice.random() < 0.8 else []
        prefix = base[: dice.choice([len(base), dice.randint(0, len(base))])]
        more = [dice.choice([1, 2, 3, IMAGE, IMAGE + 1]) for _ in range(dice.choice([0, 1, 5, 60]))]
        sequences.append(prefix + more or [7])
    return [tokens(each) for each in sequences]


def path(pack: PlannedPack, node: int) -> list[int]:
    """Return the nodes from the root to `node`."""
    result: list[int] = []
    while node >= 0:
        result.insert(0, node)
        node = pack.nodes[node].parent
    return result


def read(pack: PlannedPack, node: int, sequences: list[Tokens]) -> Tokens:
    """Return the tokens that the last token of a node attends to, including itself."""
    parts = [pack.nodes[index] for index in path(pack, node)]
    return np.concatenate([sequences[n.sequence][n.begin : n.end] for n in parts])


@settings(max_examples=150, deadline=None)
@given(batches(), st.integers(20, 400), st.sampled_from([1, 1, 2, 3, 4]))
def test_each_sequence_ends_once_behind_its_own_tokens_within_the_budget(
    sequences: list[Tokens], budget: int, ranks: int
) -> None:
    packs_of = plan(sequences, pack_tokens=budget, costs=COSTS, ranks=ranks)
    assert len(packs_of) == ranks
    assert len({len(packs) for packs in packs_of}) == 1
    ending: list[int] = []
    for packs in packs_of:
        for pack in packs:
            alone = len({sequences[index].tobytes() for index, _ in pack.ends}) <= 1
            assert pack.tokens <= budget or alone or len(pack.ends) == 0
            longest = max((len(sequences[index]) for index, _ in pack.ends), default=0)
            assert pack.tokens <= max(budget, longest) or not pack.ends
            for index, node in enumerate(pack.nodes):
                assert node.parent < index
                assert node.begin < node.end
                first = pack.nodes[node.parent].end if node.parent >= 0 else 0
                assert node.begin == first
            for sequence, node in pack.ends:
                context = read(pack, node, sequences)
                assert np.array_equal(context[: len(sequences[sequence])], sequences[sequence])
                ending.append(sequence)
    assert sorted(ending) == list(range(len(sequences)))
    again = plan(sequences, pack_tokens=budget, costs=COSTS, ranks=ranks)
    assert again == packs_of


@settings(max_examples=100, deadline=None)
@given(batches())
def test_what_many_share_is_computed_once_where_it_fits(sequences: list[Tokens]) -> None:
    [[pack]] = plan(sequences, pack_tokens=10**6, costs=COSTS)
    distinct = {each[:end].tobytes() for each in sequences for end in range(1, len(each) + 1)}
    # Short repetitions are left as they are: fewer than LEAST_SHARED at each branch.
    assert len(distinct) <= pack.tokens <= len(distinct) + LEAST_SHARED * len(sequences)
    assert pack.tokens <= sum(map(len, sequences))


def test_a_chain_alone_is_one_plain_node() -> None:
    chain = tokens(list(range(1, 300)))
    [[pack]] = plan([chain[:100], chain[:200], chain], pack_tokens=1000, costs=COSTS)
    assert len(pack.nodes) == 1
    assert pack.ends == ((0, 0), (1, 0), (2, 0))
    assert pack.cost == 100.0 * 299 + 0.5 * 299 * 300 / 2


def test_a_groups_first_step_is_one_node_with_a_branch_each() -> None:
    prompt = list(range(1, 101))
    group = [tokens([*prompt, *range(1000 * n, 1000 * n + 30)]) for n in range(1, 9)]
    [[pack]] = plan(group, pack_tokens=1000, costs=COSTS)
    assert pack.tokens == 100 + 8 * 30
    assert [node.parent for node in pack.nodes] == [-1] + [0] * 8


def test_a_prefix_that_does_not_fit_with_all_its_branches_is_computed_again() -> None:
    prompt = list(range(1, 101))
    group = [tokens([*prompt, *range(1000 * n, 1000 * n + 60)]) for n in range(1, 5)]
    [packs] = plan(group, pack_tokens=230, costs=COSTS)
    assert [pack.tokens for pack in packs] == [220, 220]
    assert [pack.nodes[0].end for pack in packs] == [100, 100]


def test_a_sequence_longer_than_the_budget_goes_alone() -> None:
    sequences = [tokens([5] * 500), tokens([6] * 40), tokens([7] * 40)]
    [packs] = plan(sequences, pack_tokens=100, costs=COSTS)
    assert sorted([index for index, _ in pack.ends] for pack in packs) == [[0], [1, 2]]


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_ranks_wait_little_for_each_other(ranks: int) -> None:
    """Plan trajectories of unequal length: the work of each rank, pack by pack, is near the mean."""
    dice = random.Random(ranks)
    sequences = []
    for group in range(6):
        screen = [IMAGE + group] * 300
        for number in range(8):
            for chain in range(dice.randint(1, 4)):
                name = 1 + 40 * (8 * group + number) + chain
                sequences.append(tokens([*screen, *[name] * dice.randint(300, 1500)]))
    packs_of = plan(sequences, pack_tokens=8192, costs=COSTS, ranks=ranks)
    rows = list(zip(*packs_of, strict=True))
    waited = sum(max(pack.cost for pack in row) for row in rows)
    worked = sum(pack.cost for row in rows for pack in row) / ranks
    assert waited <= 1.1 * worked


@pytest.mark.parametrize("ranks", [1, 4])
def test_fewer_sequences_than_ranks_give_empty_packs_of_the_cheapest(ranks: int) -> None:
    sequences = [tokens([3] * 200), tokens([4] * 50)]
    packs_of = plan(sequences, pack_tokens=300, costs=COSTS, ranks=ranks)
    assert [len(packs) for packs in packs_of] == [1] * ranks
    if ranks == 4:
        ends = sorted(len(packs[0].ends) for packs in packs_of)
        assert ends == [0, 0, 1, 1]
        assert [p[0].tokens for p in packs_of if not p[0].ends] == [50, 50]
    assert plan([], pack_tokens=300, costs=COSTS, ranks=ranks) == [[] for _ in range(ranks)]
