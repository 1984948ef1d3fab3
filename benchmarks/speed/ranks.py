"""How much of N ranks' work is work: the plan of packs alone, in counted operations, without a model.

    python benchmarks/speed/ranks.py
    python benchmarks/speed/ranks.py --trajectories 16 --out benchmarks/results/ranks.json

The physical limit is 1: every rank computes for as long as any other, and nothing twice. What keeps a
plan from it: ranks wait for each other at every pack, since their layers are gathered together; a node of
a tree that two packs need is computed in both; a rank without a pack computes a padding one.

    efficiency_N = operations of the plan for one rank / (N * sum over packs of the costliest rank's)

so it is the speed-up of N ranks over one, divided by N, if an operation takes the same time everywhere.
`balance_N` counts the waiting alone: mean cost over the costliest, pack by pack, padding at its cost.

Batches are generated: groups of trajectories of about 30 steps, lengths spread from 8 to 60, screens of
1,196 tokens (1280 x 720), completions of 60 to 140 tokens, for a 7B. Histories: `evict` 7 -> 3, where
between two evictions each prompt extends the one before, and `slide` 5, where from the fifth step on each
drops a screen. A chain is cut where the prompt no longer extends (dart_cli/data/loading.py).

The last line is JSON: `efficiency_2`, `efficiency_4`, `efficiency_8` of evict at 16k tokens, and all rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np

from dart_cli.train.packs.plan import IMAGE, Costs, PlannedPack, Tokens, plan

SCREEN, INSTRUCTION, SYSTEM, TURN = 1196, 60, 500, 12  # tokens
COSTS = Costs(token=13.05e9, pair=4.01e5, image_token=0.0)
"""Of a forward pass of UI-TARS-1.5-7B's language model; its frozen vision tower runs once a screen."""
RANKS = (2, 4, 8)


def batch(history: str, groups: int, trajectories: int, seed: int) -> list[Tokens]:
    """Return the chains of a batch, as the plan reads them."""
    draw, images = Random(seed), iter(range(1 << 30))
    chains: list[Tokens] = []
    for _ in range(groups):
        system = [draw.randrange(1000) for _ in range(SYSTEM + INSTRUCTION)]
        first = next(images)  # all of a group's trajectories begin with one screen
        middle = draw.choice((12, 20, 30, 45))
        for _ in range(trajectories):
            steps = min(60, max(8, round(draw.gauss(middle, middle / 4))))
            shown = [first, *(next(images) for _ in range(steps - 1))]
            said = [
                [draw.randrange(1000, 50000) for _ in range(draw.randint(60, 140))]
                for _ in range(steps)
            ]
            chains += _chains(history, system, shown, said)
    return chains


def _chains(
    history: str, system: list[int], shown: list[int], said: list[list[int]]
) -> Iterator[Tokens]:
    """One trajectory's: `visible` screens of each step decide where the next chain begins."""
    kept_from, before = 0, -1
    tokens: list[int] = []
    for step in range(len(shown)):
        if history == "slide":
            kept_from = max(0, step - 4)
        elif step - kept_from + 1 > 7:
            kept_from = step - 2
        if kept_from != before and step:
            yield np.array(tokens, dtype=np.uint32)
        tokens, before = list(system), kept_from
        for turn in range(step + 1):
            if turn >= kept_from:
                tokens += [IMAGE + shown[turn]] * SCREEN
            tokens += [7] * TURN + said[turn]
    yield np.array(tokens, dtype=np.uint32)


def measured(chains: list[Tokens], pack_tokens: int, ranks: int) -> dict[str, float]:
    """Efficiency and balance of the plan for so many ranks."""
    [alone] = plan(chains, pack_tokens=pack_tokens, costs=COSTS)
    dealt = plan(chains, pack_tokens=pack_tokens, costs=COSTS, ranks=ranks)
    rows = [[cost_of(pack) for pack in row] for row in zip(*dealt, strict=True)]
    slowest = sum(max(row) for row in rows)
    return {
        "packs": float(len(rows)),
        "efficiency": sum(cost_of(pack) for pack in alone) / (ranks * slowest),
        "balance": sum(map(sum, rows)) / (ranks * slowest),
        "work": sum(map(sum, rows)) / sum(cost_of(pack) for pack in alone),
    }


def cost_of(pack: PlannedPack) -> float:
    """Return what a pack costs, counted from its nodes; a padding pack, which scores nothing, costs as much."""
    total = 0.0
    for node in pack.nodes:
        pairs = (node.end * (node.end + 1) - node.begin * (node.begin + 1)) / 2
        total += COSTS.token * (node.end - node.begin) + COSTS.pair * pairs
    return total


def main() -> None:
    """Print a row for each history and pack size, and the JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--trajectories", type=int, default=8, help="of each group")
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--out", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    rows = []
    for history in ("evict", "slide"):
        made = [
            batch(history, arguments.groups, arguments.trajectories, seed)
            for seed in range(arguments.batches)
        ]
        for pack_tokens in (16_384, 32_768):
            for ranks in RANKS:
                found = [measured(chains, pack_tokens, ranks) for chains in made]
                mean = {name: sum(f[name] for f in found) / len(found) for name in found[0]}
                worst = min(each["efficiency"] for each in found)
                row = {"history": history, "pack_tokens": pack_tokens, "ranks": ranks, **mean}
                rows.append(row | {"worst": worst})
                print(
                    f"{history} {pack_tokens:6d} tokens, {ranks} ranks: efficiency "
                    f"{mean['efficiency']:.3f} (worst {worst:.3f}), balance {mean['balance']:.3f}, "
                    f"work {mean['work']:.3f}, {mean['packs']:.0f} packs a rank"
                )
    chosen = [row for row in rows if (row["history"], row["pack_tokens"]) == ("evict", 16_384)]
    result = {
        "benchmark": "ranks",
        **{f"efficiency_{row['ranks']}": round(float(row["efficiency"]), 4) for row in chosen},
        **{f"balance_{row['ranks']}": round(float(row["balance"]), 4) for row in chosen},
        "batches": arguments.batches,
        "trajectories": arguments.groups * arguments.trajectories,
        "rows": [
            {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows
        ],
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
