"""All cells of explore_effect.py -> hit rates, differences and coverage, by application and over all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.learning.study import Cell, Result
from dart_cli.algo.statistics import interval_of_mean

ARMS: Mapping[str, str] = {
    "untuned": "untuned",
    "random": "random",
    "count": "count",
    "recency": "recency",
    "q": "qicrl",
}
"""Arm -> its name in the result file."""
WITH, WITHOUT = "practised-q", "practised-untuned"
KNOWN = ("covered", "another_state", "never_seen")


def summarize(found: Mapping[str, Mapping[Cell, Result]]) -> dict[str, Any]:
    """Return the result file."""
    everything = {
        (name, cell): result for name, cells in found.items() for cell, result in cells.items()
    }
    instances = {(name, cell.seed) for name, cell in everything}
    return {
        "instances": len(instances),
        **_figures(everything),
        "applications": {
            name: _figures({(name, cell): result for cell, result in cells.items()})
            for name, cells in found.items()
        },
        "cells": {
            name: {cell.name: _brief(result) for cell, result in cells.items()}
            for name, cells in found.items()
        },
    }


def _brief(result: Result) -> Result:
    """Return a cell without its hits by screen; one of practice as it is."""
    if "hits" not in result:
        return result
    by_screen = {known: _known([result], known) for known in KNOWN}
    told = {key: value for key, value in result.items() if key != "hits"}
    return told | {"hit": hit(result), "questions": result["hits"].get("n"), "by_screen": by_screen}


def hit(result: Result, known: str = "") -> float | None:
    """Mean hit@1 over the screens of a cell, or over those that its arm knows so; None without one."""
    hits, how = result["hits"]["screens"], result["hits"]["known"]
    return _mean([value for screen, value in hits.items() if known in ("", how[screen])])


def _figures(cells: Mapping[tuple[str, Cell], Result]) -> dict[str, Any]:
    hits: dict[str, dict[tuple[str, int], float]] = {arm: {} for arm in ARMS}
    for (name, cell), result in cells.items():
        if cell.arm in hits and (value := hit(result)) is not None:
            hits[cell.arm][name, cell.seed] = value
    told: dict[str, Any] = {}
    for arm, label in ARMS.items():
        told[f"hit_{label}"] = _mean(list(hits[arm].values()))
        told[f"hit_{label}_interval"] = _interval(list(hits[arm].values()))
    pairs = [("q", other) for other in ("random", "count", "recency", "untuned")]
    for arm, other in [*pairs, ("count", "random")]:
        both = sorted(hits[arm].keys() & hits[other].keys())
        apart = [hits[arm][key] - hits[other][key] for key in both]
        told[f"{ARMS[arm]}_minus_{ARMS[other]}"] = _difference(apart)
    for arm, label in ARMS.items():
        own = [result for (_, cell), result in cells.items() if cell.arm == arm]
        told[f"by_screen_{label}"] = {known: _known(own, known) for known in KNOWN}
        told[f"covered_{label}"] = _mean(
            [each["covered"] for each in own if each["covered"] is not None]
        )
        told[f"cpu_s_{label}"] = _mean([each["cpu_s"] for each in own])
    return told | _practised(cells)


def _practised(cells: Mapping[tuple[str, Cell], Result]) -> dict[str, Any]:
    """Success before and after reinforcement learning, and what the rows made of it."""
    found: dict[str, dict[tuple[str, int], Result]] = {WITH: {}, WITHOUT: {}}
    for (name, cell), result in cells.items():
        if cell.arm in found:
            found[cell.arm][name, cell.seed] = result
    told: dict[str, Any] = {}
    for arm, label in ((WITH, "with"), (WITHOUT, "without")):
        own = list(found[arm].values())
        told[f"rl_before_{label}"] = _mean([each["before"] for each in own])
        told[f"rl_success_{label}"] = _mean([each["after"] for each in own])
    both = sorted(found[WITH].keys() & found[WITHOUT].keys())
    apart = [found[WITH][key]["after"] - found[WITHOUT][key]["after"] for key in both]
    told["rl_with_minus_without"] = _difference(apart)
    return told


def _difference(apart: Sequence[float]) -> dict[str, Any]:
    """Of pairs."""
    return {"value": _mean(apart), "interval": _interval(apart), "n": len(apart)}


def _known(results: Sequence[Result], known: str) -> dict[str, Any]:
    values = [value for each in results if (value := hit(each, known)) is not None]
    screens = sum(how == known for each in results for how in each["hits"]["known"].values())
    return {"hit": _mean(values), "screens": screens}


def _interval(values: Sequence[float]) -> list[float] | None:
    found = interval_of_mean(values, seed=0)
    return None if found is None else [round(each, 4) for each in found]


def _mean(values: Sequence[float]) -> float | None:
    return round(fmean(values), 4) if values else None
