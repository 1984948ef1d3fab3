"""Draws when slots, rollout workers and trainer were busy in a run's window.

    phases_of_slots   the database's steps and episodes -> phase of every slot at every moment
    draw              that, the workers' load and the trainer's work, one above the other

Read from the database, not from heartbeats: each step records when it was stored and how long the
model and the environment took, so the picture is exact to a cell's width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from benchmarks.run_times import EpisodeTimes, StepTimes, episode_times, step_times
from benchmarks.simulation.recording import Recording
from dart_cli.data.store.reader import Reader
from dart_cli.runtime.waits import PREFIX

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CELLS = 900
"""Columns of a picture."""

PHASES = {  # of a slot, in the order of their numbers: name, colour, what it means
    "idle": ("#f3f4f6", "no episode"),
    "resetting": ("#a5b4fc", "resetting"),
    "waiting": ("#fbbf24", "waits for the model"),
    "playing": ("#059669", "the GUI acts"),
    "suspended": ("#c4b5a5", "suspended for the trainer"),
    "dropped": ("#dc2626", "lost to a fault"),
}
_NUMBER = {name: number for number, name in enumerate(PHASES)}
_BUSY, _TRAIN, _SYNC = "#059669", "#2563eb", "#db2777"


def phases_of_slots(
    episodes: Sequence[EpisodeTimes],
    steps: Sequence[StepTimes],
    began: float,
    window_end: float,
    cells: int = CELLS,
) -> NDArray[np.uint8]:
    """Return phase numbers [slots, cells] of the window, slots in order of process and number."""
    slots = {key: row for row, key in enumerate(sorted({(e.worker, e.slot) for e in episodes}))}
    grid = np.zeros((len(slots), cells), dtype=np.uint8)
    place = {episode.id: slots[episode.worker, episode.slot] for episode in episodes}

    def paint(row: int, begin: float, end: float, phase: str) -> None:
        first, last = ((at - began) / (window_end - began) * cells for at in (begin, end))
        grid[row, max(0, round(first)) : max(0, round(last))] = _NUMBER[phase]

    for episode in episodes:
        is_over = episode.ended_at is not None and episode.ended_at < window_end
        end = episode.ended_at if episode.ended_at is not None and is_over else window_end
        is_lost = is_over and episode.state == "dropped" and episode.outcome not in ("pass", "fail")
        paint(place[episode.id], episode.leased_at, end, "dropped" if is_lost else "waiting")
        paint(
            place[episode.id],
            episode.leased_at,
            episode.leased_at + (episode.reset_s or 0.0),
            "resetting",
        )
    for step in steps:
        if step.trajectory_id in place:
            row, acted = place[step.trajectory_id], step.at - step.env_s
            paint(row, acted - step.model_s, acted, "waiting")
            paint(row, acted, step.at, "playing")
    return grid


def draw(
    recording: Recording,
    reader: Reader,
    path: Path,
    *,
    title: str,
    speedup: float,
    takes_turns: bool,
) -> None:
    """Write the picture of one run as a PNG; time in simulated minutes."""
    from matplotlib.figure import Figure

    began, window_end = recording.began, recording.end
    grid = phases_of_slots(episode_times(reader), step_times(reader), began, window_end)
    if takes_turns:
        _suspend(grid, _turns(reader, window_end), began, window_end)
    minutes = (window_end - began) * speedup / 60

    def at(moment: float) -> float:
        return (moment - began) * speedup / 60

    figure = Figure(figsize=(11, 5.2), dpi=110, layout="constrained")
    slots, workers, trainer = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": [6, 2.2, 0.7]}
    )
    _draw_slots(slots, grid, minutes)
    slots.set_title(title, loc="left", fontsize=11)
    _draw_workers(workers, recording, reader, at)
    for batch in reader.batches():
        end = window_end if batch.trained_at is None else batch.trained_at
        trainer.barh(0, at(end) - at(batch.formed_at), 0.8, at(batch.formed_at), color=_TRAIN)
    trainer.set_yticks([0], ["train"], fontsize=7)
    trainer.set_xlabel("minutes (simulated)")
    for axes in (slots, workers, trainer):
        axes.set_xlim(0, minutes)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_slots(axes: Axes, grid: NDArray[np.uint8], minutes: float) -> None:
    """Draw a row for every slot, with a colour for every phase."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    axes.imshow(
        grid,
        aspect="auto",
        interpolation="nearest",
        cmap=ListedColormap([colour for colour, _ in PHASES.values()]),
        vmin=0,
        vmax=len(PHASES) - 1,
        extent=(0, minutes, len(grid), 0),
    )
    axes.set_ylabel(f"{len(grid)} environments")
    axes.set_yticks([])
    phases = [name for name in PHASES if (grid == _NUMBER[name]).any()]
    axes.legend(
        handles=[Patch(facecolor=PHASES[name][0], label=PHASES[name][1]) for name in phases],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.01),
        ncols=len(phases),
        fontsize=8,
        frameon=False,
    )


def _draw_workers(
    axes: Axes, recording: Recording, reader: Reader, at: Callable[[float], float]
) -> None:
    """Draw a row for every rollout worker: how busy it was, when it took weights, when it was killed."""
    names = sorted({beat.worker for beat in recording.beats if beat.role == "rollout"})
    for row, name in enumerate(names):
        for begin, end, share in _busy(recording, name):
            axes.barh(row, at(end) - at(begin), 0.8, at(begin), color=_BUSY, alpha=min(1.0, share))
    for sync in reader.syncs():
        if sync.worker in names and not sync.error:
            span = at(sync.done_at) - at(sync.granted_at)
            axes.barh(names.index(sync.worker), span, 0.8, at(sync.granted_at), color=_SYNC)
    for killed, name in recording.kills:
        axes.plot(at(killed), names.index(name), marker="x", color="black")
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_ylabel("busy, sync", fontsize=8)


def _turns(reader: Reader, end: float) -> list[tuple[float, float]]:
    """Return when the rollouts of a synchronous run paused: from a batch until all workers have its weights."""
    syncs = reader.syncs()
    turns = []
    for batch in reader.batches():
        if batch.trained_at is None:
            turns.append((batch.formed_at, end))
            continue
        swap_times = [
            sync.done_at for sync in syncs if sync.policy_version == batch.trained_version
        ]
        turns.append((batch.formed_at, max([batch.trained_at, *swap_times])))
    return turns


def _suspend(
    grid: NDArray[np.uint8], turns: Sequence[tuple[float, float]], began: float, end: float
) -> None:
    """Mark slots that wait during the trainer's turn as suspended, not as waiting for the model."""
    cells = grid.shape[1]
    for turn in turns:
        first, last = (max(0, round((at - began) / (end - began) * cells)) for at in turn)
        part = grid[:, first:last]
        part[part == _NUMBER["waiting"]] = _NUMBER["suspended"]


def _busy(recording: Recording, worker: str) -> list[tuple[float, float, float]]:
    """Return (begin, end, share of the time with a request running) between a worker's heartbeats."""
    beats = [beat for beat in recording.beats if beat.worker == worker]
    spans = []
    for before, after in pairwise(beats):
        seconds = after.sent_at - before.sent_at
        if before.started_at == after.started_at and seconds > 0:
            gauge = PREFIX + "busy"
            busy = after.gauges.get(gauge, 0.0) - before.gauges.get(gauge, 0.0)
            spans.append((before.sent_at, after.sent_at, max(0.0, busy / seconds)))
    return spans
