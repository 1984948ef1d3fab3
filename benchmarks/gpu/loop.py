"""The check of scripts/gpu-check that plays a whole run, with all its processes on one GPU.

loop    a whole 7B with adapters: it plays, is updated, published and served again

The 7B's weights are drawn, and write clicks (dart_cli/smoke_test/token_chain.py). As in a smoke test, an episode's
verdict is a coin's. Everything else is the run that a person starts with `dart up`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.gpu.settings import ROOT, BrokenError, Figures, Settings

UPDATES = 3
END_S = 30.0
"""Of the check's time, to end the run and to read what it left."""
NAME = "UI-TARS-1.5-7B"


def loop(settings: Settings) -> Figures:
    """Run three updates of adapters on every layer, with the log-probability check on."""
    shutil.rmtree(settings.scratch / "shards", ignore_errors=True)  # the memory is needed
    began = time.monotonic()
    updates = 1 if settings.tiny else UPDATES
    config = _write_config(settings, updates)
    figures: Figures = {"seconds_to_make_the_model": round(time.monotonic() - began, 1)}
    figures |= _play(config, settings.seconds - END_S - (time.monotonic() - began))
    if figures["updates"] < updates:
        raise BrokenError(f"{figures['updates']} of {updates} updates: {figures['end']}", figures)
    return figures


def _write_config(settings: Settings, updates: int) -> Path:
    """Write the configuration, its model folder and its suite; return its path."""
    from dart_cli.config.load import load_config
    from dart_cli.config.model_folder import read_json
    from dart_cli.smoke_test.coin_suite import suite_file
    from dart_cli.smoke_test.miniature_model import write_clicking_model, write_miniature
    from dart_cli.smoke_test.published_model_files import write_published_files

    width, height = (224, 168) if settings.tiny else settings.size.screen
    folder = settings.scratch / "acting" / NAME
    small = settings.scratch / "miniature" / NAME
    for each in (folder, small):
        each.parent.mkdir()
    path = settings.scratch / "loop.toml"
    text = f"""
[run]
dir = "{settings.scratch / "loop"}"
[model]
path = "{small if settings.tiny else folder}"
dtype = "{"float32" if settings.tiny else "bfloat16"}"
freeze_vision = true
lora = {{ rank = {4 if settings.tiny else 32} }}
[policy]
action_parser = "uitars"
coordinates = "resized"
history_images = 3
history_turns = 35
family = "ui-tars-1.5"
[env]
suite = {json.dumps(suite_file(settings.scratch, "mini"))}
slots = 8
options = {{ size = "{width}x{height}" }}
[rollout]
engine = "transformers"
max_tokens = 64
max_batch = 8
device = "{settings.device}"
[data]
group_size = 4
groups_per_batch = 2
max_open_groups = 8
[train]
device = "{settings.device}"
recompute = "layer"
pack_tokens = {settings.size.pack_tokens}
updates = {updates}
lr = 1e-5
parity_every = 1
checkpoint_every = {updates}
[eval]
around = false
"""
    path.write_text(text, encoding="utf-8")
    config = load_config(path)
    write_published_files(config, folder)
    chain = write_miniature(folder, small, config, (width, height))
    if chain is None:
        raise BrokenError("the model writes no actions", {})
    if not settings.tiny:
        tree = read_json(folder, "config.json") | {"vocab_size": settings.size.text["vocab_size"]}
        (folder / "config.json").write_text(json.dumps(tree), encoding="utf-8")
        write_clicking_model(folder, chain, "bfloat16", settings.device)
        _free(settings.device)
    return path


def _free(device: str) -> None:
    """Leave the GPU's memory to the processes of the run."""
    import gc

    import torch

    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def _play(config: Path, seconds: float) -> Figures:
    """Run `dart up` for at most `seconds` and return the figures of its run directory."""
    from dart_cli.config.load import load_config

    command = [sys.executable, "-m", "dart_cli", "up", str(config)]
    run = load_config(config).run.dir
    log = run.with_suffix(".log")
    began = time.monotonic()
    with log.open("wb") as out:
        child = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
        try:
            end = f"`dart up` ended with {child.wait(seconds)}"
        except subprocess.TimeoutExpired:
            end = f"not over after {seconds:.0f} s"
            child.terminate()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    figures: Figures = {
        "end": end,
        "seconds": round(time.monotonic() - began, 1),
        "last_lines": lines[-12:],
    }
    return figures | _figures_of(run)


def _figures_of(run: Path) -> Figures:
    """Return the counts and times of a run's database."""
    from bus.errors import DartError
    from dart_cli.data.store.open import open_reader

    try:
        reader = open_reader(run)
    except DartError as error:
        return {"updates": 0, "run": str(error)}
    with reader:
        rows = [
            trajectory for trajectory in reader.trajectories() if trajectory.outcome is not None
        ]
        steps = [step for row in rows for step in reader.steps(row.id)]
        curves: dict[str, list[float]] = {}
        for point in reader.metrics():
            curves.setdefault(point.name, []).append(point.value)
        syncs, versions = reader.syncs(), reader.versions()
        updates = sum(batch.state == "trained" for batch in reader.batches())
    half = len(rows) // 2
    return {
        "updates": updates,
        "episodes": len(rows),
        "malformed": sum(row.stop_reason == "malformed" for row in rows),
        "steps": len(steps),
        "tokens_of_prompts": sum(len(step.prompt_token_ids) for step in steps),
        "tokens_sampled": sum(len(step.sampled.token_ids) for step in steps),
        "model_s_of_a_step": _mean(step.model_s for step in steps),
        "env_s_of_a_step": _mean(step.env_s for step in steps),
        "success_by_halves": [
            _mean(example.outcome == "pass" for example in part)
            for part in (rows[:half], rows[half:])
        ],
        "versions": len(versions),
        "published_at_s": [round(v.published_at - versions[0].published_at, 1) for v in versions][
            :8
        ],
        "syncs": [
            {
                "waited_s": s.waited_s,
                "transfer_s": s.transfer_s,
                "pause_s": s.pause_s,
                "error": s.error,
            }
            for s in syncs[:4]
        ],
        "metrics": _rounded(curves),
    }


def _mean(values: Any) -> float | None:
    listed = list(values)
    return round(mean(listed), 3) if listed else None


def _rounded(curves: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the first values of each metric of times, memory and parity, and the last."""
    marks = ("_s", "parity", "loss", "tokens", "memory", "_gb", "kl", "sees", "mfu")
    return {
        name: [float(f"{value:.4g}") for value in (*values[:3], *values[3:][-1:])]
        for name, values in curves.items()
        if any(part in name for part in marks)
    }
