"""Writes the tables of docs/hardware.md, from the doctor's formulas and from results; prints how GPUs are split.

    python benchmarks/gpu/hardware_tables.py                        writes them into the page, between its marks
    python benchmarks/gpu/hardware_tables.py CONFIG [--steps 30]    seconds of an update and its rollouts, who waits

tables    memory and seconds by the doctor's formulas
covered   each part of a run: how the smoke test played it, which GPU checks cover it, and their results
split     what is printed of a configuration
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.speeds import (
    ASSUMED,
    BOOT_S,
    CORES,
    H100,
    H200,
    HOUR_S,
    GpuSpeed,
    Seconds,
    screens_a_day,
    seconds_of,
)
from dart_cli.config.architecture import Shape, shape_of
from dart_cli.config.load import load_config
from dart_cli.config.model_folder import Screens
from dart_cli.config.published import OTHER_SIZES, PUBLISHED
from dart_cli.config.schema import KEEP_CHECKPOINTS, Config, VllmConfig
from dart_cli.doctor.plan import H100 as ROOM
from dart_cli.doctor.plan import Plan, make_plan
from dart_cli.doctor.plan_findings import plan_on_host
from dart_cli.doctor.trainer_memory import TrainerSetup, trainer_memory
from dart_cli.engines.vllm.room import divide
from dart_cli.smoke_test.smoke_report import MACHINE_ONLY
from envs.suites.osworld.provider import boots_at_once

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "hardware.md"
BEGIN = "<!-- {name}: python benchmarks/gpu/hardware_tables.py -->"
END = "<!-- end of {name} -->"

RANKS = (1, 2, 4, 8)
TOKENS = (9_500, 17_600, 32_768)
PROMPT = 17_600
"""Tokens of DART's prompt: five 1080p screens, 35 turns of text."""
SCREEN_TOKENS = 32 * 6 * 2691
"""Tokens of the screens in play of 32 episodes with such prompts."""
LORA = 32
_TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


@dataclass(frozen=True)
class _Model:
    name: str
    tree: dict[str, Any]


def _model(name: str, mlp_of_tower: int, *, tied: bool = False, **text: int) -> _Model:
    tower = {**_TOWER, "intermediate_size": mlp_of_tower, "out_hidden_size": text["hidden_size"]}
    tree = {"model_type": "qwen2_5_vl", "vision_config": tower, "tie_word_embeddings": tied, **text}
    return _Model(name, tree)


MODELS = (
    _model(
        "3B (Qwen2.5-VL-3B)",
        3420,
        tied=True,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        vocab_size=151936,
    ),
    _model(
        "7B (UI-TARS-1.5-7B, Qwen2.5-VL-7B)",
        3420,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
    ),
    _model(
        "32B (Qwen2.5-VL-32B)",
        3456,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=152064,
    ),
    *(
        _Model(f"{size} (Qwen3.5-{size})", {"model_type": one.model_type, **one.tree})
        for size in ("4B", "9B", "27B")
        for one in (*OTHER_SIZES, PUBLISHED["qwen3_5"])
        if one.checkpoint == f"Qwen3.5-{size}"
    ),
)
"""Sizes of the models' own config.json."""

CUT = Screens(28, 3136, 2_116_800)
"""As in UI-TARS-1.5's preprocessor."""


def tables() -> list[str]:
    """Return the lines between the marks."""
    return [*_trainers(), *_engines(), *_hosts(), *_seconds()]


def _trainers() -> Iterator[str]:
    """Yield a table for each model: a rank's memory at its peak."""
    for model in MODELS:
        shape = shape_of(model.tree)
        yield from (
            f"### {model.name}",
            "",
            f"{shape.parameters / 1e9:.2f} billion parameters, {shape.text / 1e9:.2f} of them trained.",
            "",
        )
        yield from _table(
            ("what is trained", "tokens of a pack", *map(_ranks, RANKS)),
            (
                (name, f"{tokens:,}", *_cells(shape, replace(_setup(tokens), **changes)))
                for name, changes in _ways(shape).items()
                for tokens in TOKENS
            ),
        )


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, texts: Collection[int] = (0,)
) -> Iterator[str]:
    """Yield a table and the empty line after it; `texts` are the columns that are no numbers."""
    rule = ["---" if column in texts else "---:" for column in range(len(heads))]
    yield f"| {' | '.join(heads)} |"
    yield f"|{'|'.join(rule)}|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def _ways(shape: Shape) -> dict[str, dict[str, Any]]:
    return {
        "all weights": {},
        "all, recompute": {"recompute": True},
        "all, recompute, offload": {"recompute": True, "offload": True},
        f"LoRA of rank {LORA}": {"adapters": shape.adapters(LORA)},
        "LoRA, recompute": {"adapters": shape.adapters(LORA), "recompute": True},
    }


def _setup(tokens: int) -> TrainerSetup:
    """Return a setup with the reference of a KL, and one predicted token in thirty, at least 512."""
    return TrainerSetup(tokens=tokens, predicted=max(512, tokens // 30), reference=True)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _cells(shape: Shape, setup: TrainerSetup) -> list[str]:
    """Return a rank's memory with each number of ranks."""
    cells = []
    for ranks in RANKS:
        total = trainer_memory(shape, replace(setup, ranks=ranks)).total
        text = f"{total / 1e9:.0f}"
        if total <= H100.memory:
            text = f"**{text}**"
        elif total > H200.memory:
            text = f"({text})"
        cells.append(text)
    return cells


def _engines() -> Iterator[str]:
    yield from (
        "### Room of an engine",
        "",
        "Number of prompts of 17,600 tokens (five 1080p screens) whose keys and values fit beside the features of",
        "32 episodes' screens, at `vllm.gpu_memory_utilization = 0.9`; and bytes of keys and values of a token:",
        "",
    )
    rows = []
    for model in MODELS:
        shape = shape_of(model.tree)
        cells = [_prompts(shape, gpu, share) for gpu in (H100, H200) for share in (1, 2)]
        rows.append([model.name, f"{2 * shape.cached / 1000:.0f} kB", *cells])
    heads = ("model", "a token", "one 80 GB", "two of 80 GB", "one 141 GB", "two of 141 GB")
    yield from _table(heads, rows)


def _prompts(shape: Shape, gpu: GpuSpeed, share: int) -> str:
    config = VllmConfig(tensor_parallel=share)
    room = divide(
        config, shape, wide=2, memory=gpu.memory, length=PROMPT, screen_tokens=SCREEN_TOKENS
    )
    count = room.cache * share / (PROMPT * 2 * shape.cached)
    return f"{count:.0f}" if count >= 1 else "none"


def _hosts() -> Iterator[str]:
    yield from (
        "### Host",
        "",
        "What a trainer on one rank takes with updates of 48 trajectories of 30 steps at 1920x1080: `/dev/shm` for",
        "weight sets (`weights.keep = 3`), bytes of one checkpoint, main memory. Each further rank takes 1.5 GB of",
        "main memory. Engines and environments are not included; `dart doctor CONFIG` lists all parts.",
        "",
    )
    rows = []
    for model in MODELS:
        name = model.name.split()[0]
        ways: dict[str, dict[str, dict[str, Any]]] = {
            f"{name}, all weights": {},
            f"{name}, LoRA of rank {LORA}": {"model": {"lora": {"rank": LORA}}},
        }
        for way, changes in ways.items():
            here = _plan(model, 1, changes).host
            there = _plan(model, 1, {**changes, "train": {"offload": "optimizer"}}).host
            sizes = [here.shared, here.checkpoints / (1 + KEEP_CHECKPOINTS)]
            sizes += [host.memory_of("train") for host in (here, there)]
            rows.append([way, *(f"{size / 1e9:.{int(size < 1e10)}f} GB" for size in sizes)])
    heads = ("`/dev/shm`", "a checkpoint", "main memory", "main memory with offload")
    yield from _table(("what is trained", *heads), rows)


def _seconds() -> Iterator[str]:
    yield from (
        "### Seconds of an update, and who waits",
        "",
        "UI-TARS-1.5-7B on eight H100. An update has 48 trajectories of 30 steps at 1920x1080, with the 80 % of",
        "steps of highest entropy, a KL and recompute. Four environment processes have 32 slots each, with OSWorld's",
        f"pause of 2 s. A virtual machine boots for each episode in {BOOT_S:g} s, {boots_at_once(CORES, 4)} of them at a time: half of {CORES}",
        "cores, 4 for each (`env.options.boots`).",
        "",
    )
    histories: dict[str, dict[str, Any]] = {
        "the newest 5 screens (DART's)": {},
        "evictions, 7 to 3 screens": {"history_images": 3, "history_images_most": 7},
    }
    rows = []
    for name, policy in histories.items():
        for ranks in (4, 5, 6, 7):
            changes = {"policy": policy}
            plan = _plan(MODELS[1], ranks, changes)
            seconds = seconds_of(_eight(ranks, changes), plan, H100)
            times = (f"{each:.0f} s" for each in (seconds.update, seconds.rollouts))
            rows.append([name, f"{ranks} + {8 - ranks}", *times, seconds.waits])
    yield from _table(
        ("history", "GPUs: trainer + rollout", "update", "rollouts", "who waits"),
        rows,
        texts=(0, 1, 4),
    )


def _plan(model: _Model, ranks: int, changes: Mapping[str, Mapping[str, Any]]) -> Plan:
    """Return the plan of a run on eight GPUs, or as many as the ranks and one engine take."""
    return make_plan(_eight(ranks, changes), model.tree, CUT, ROOM)


def _eight(ranks: int, changes: Mapping[str, Mapping[str, Any]]) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "model": {"dtype": "bfloat16", "freeze_vision": True},
        "policy": {"history_images": 5, "history_turns": 35},
        "env": {"slots": 32, "options": {"vm": "Ubuntu.qcow2", "pause_s": 2.0}},
        "rollout": {"engine": "vllm", "max_tokens": 512, "max_batch": 64, "device": "cuda"},
        "data": {"group_size": 8, "groups_per_batch": 6, "high_entropy": 0.8},
        "train": {
            "ranks": ranks,
            "recompute": "layer",
            "kl_beta": 0.1,
            "device": "cuda",
            "pack_tokens": 32_768,
        },
        "up": {"rollouts": max(1, 8 - ranks), "envs": 4},
    }
    merged = {name: {**section, **changes.get(name, {})} for name, section in sections.items()}
    return Config.model_validate(merged)


def covered() -> list[str]:
    """Return the parts of a run that the smoke test of configs/ui-tars-7b.toml and scripts/gpu-check covered."""
    results = ROOT / "benchmarks" / "results"
    parts = json.loads((results / "smoke_test.json").read_text())["ui-tars-7b"]["parts"]
    report = json.loads((results / "gpu.json").read_text())
    words = {"configured": "as configured", "stood_in": "substitute"}
    rows = [(name, words[state], "") for name, state in parts.items() if state in words]
    for name, checks in MACHINE_ONLY.items():
        verdicts = ", ".join(f"`{check}` {_result_of(report, check)}" for check in checks)
        rows.append((name, "real machine only", verdicts or "no check"))
    heads = ("part of a run", "in a smoke test", "`scripts/gpu-check` on the last GPU")
    return list(_table(heads, rows, texts=range(len(heads))))


def _result_of(report: Mapping[str, Any], check: str) -> str:
    """Return the result of a check, in words."""
    for state in ("failed", "missed", "left_out"):
        if check in report[state]:
            return state.replace("_", " ")
    return "passed" if check in report["checks"] else "not run"


def with_tables(text: str) -> str:
    """Return a page with these tables between their marks. Raises ValueError where it has no marks."""
    for name, lines in (("tables", tables()), ("covered", covered())):
        begin, end = BEGIN.format(name=name), END.format(name=name)
        before, mark, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (mark and closed):
            raise ValueError(f"the page needs {begin} and {end}")
        text = "\n".join([before + begin, "", *lines]) + end + after
    return text


def split(config: Config, plan: Plan) -> str:
    """Return the seconds of an update and its rollouts on H100s, the side that waits, and how long the disk lasts."""
    seconds = seconds_of(config, plan, H100)
    uses = "" if seconds.uses == 1 else f" ({seconds.uses} of them on each batch)"
    days = config.data.max_gb * 1e9 / screens_a_day(config, plan, seconds)
    return (
        f"an update {_short(seconds.update)}{uses}, its rollouts {_short(seconds.rollouts)} (engines "
        f"{_short(seconds.engines)}, environments {_short(seconds.environments)}): {seconds.waits}; "
        f"{_boots(config, seconds)}data.max_gb = {config.data.max_gb:g} keeps {days:.1f} days of screens; assumed: {ASSUMED}"
    )


def _boots(config: Config, seconds: Seconds) -> str:
    """Return the episodes an hour that boots allow, and that the rest would play; empty without machines."""
    if not seconds.boots:
        return ""
    episodes = config.data.group_size * config.data.groups_per_batch
    boots = seconds.boots_at_once
    allowed = HOUR_S * boots / BOOT_S
    rest = max(seconds.training, seconds.engines, seconds.environments)
    whose = "env.options.boots" if config.env.options.get("boots") else f"half of {CORES} cores"
    return (
        f"{boots} boots at once ({whose}) of {BOOT_S:g} s are {allowed:.0f} episodes an hour, the rest of the run "
        f"takes {HOUR_S * episodes / rest:.0f}; "
    )


def _short(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def main() -> None:
    """Write the page, or print a configuration's split."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, help="of an episode; default what the tasks allow")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    options = parser.parse_args()
    if options.config is None:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    config = load_config(options.config, options.sets)
    plan = plan_on_host(config, options.steps)
    if plan is None or plan.plan.trainer is None or plan.plan.engine is None:
        sys.exit("error: this configuration trains or samples without a model folder")
    print(split(config, plan.plan))


if __name__ == "__main__":
    main()
