"""What screens dropped several at once cost or gain: `policy.history_images_most` against a window that slides.

    python benchmarks/learning/history.py                    # 3 seeds of slide and evict, a run at a time
    python benchmarks/learning/history.py --seeds 1 --updates 5

    slide    the newest 5 screens
    evict    all until there would be more than 7, then the newest 3: five on average
    single   the present screen alone: the control, which cannot know the answer

configs/history.toml: suite `recall` asks where a button was 1 to 6 pages ago. By arithmetic `slide` and
`evict` show the button in the same share of all questions, two thirds; `slide` always up to four pages ago
and never before, `evict` now and then at any lag but the shortest. Chance is one in four, so the limit of
both is 0.75. All arms start from one model (scripts/build_recall_base.py), train equally many updates by
`dart up`, and are judged by `dart eval` on seeds never trained on.

Of each run's recorded prompts the tokens are counted: alone, and without what the episode's (the group's)
prompts and completions before had already, which is what a prefix cache can save at most. Results stand in WORK, a JSON file
for each run, and are not measured again. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.learning.study import (
    Cell,
    Result,
    ResultCache,
    call,
    call_within,
    dart,
    overrides,
    play_missing,
    settings_of,
)
from bus.errors import DartError
from dart_cli.algo.statistics import wilson
from dart_cli.config.load import load_config
from dart_cli.data.store.open import open_reader
from dart_cli.data.store.steps import StepRow

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "history.toml"
ARMS: dict[str, list[str]] = {
    "slide": [],
    "evict": [
        "policy.history_images=3",
        *("policy.history_images_most=7", "policy.history_turns=2"),
    ],
    "single": ["policy.history_images=1", "policy.history_turns=0"],
}
CONTROL = "single"  # played with one seed
DEADLINE_S = 3600.0  # of one run
IMAGE_TOKEN = "<|image_pad|>"


def main() -> None:
    """Play what is missing and print one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each arm: 0, 1, ...")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--updates", type=int, help="in place of the configuration's")
    parser.add_argument("--work", type=Path, default=Path("runs/bench-history"))
    arguments = parser.parse_args()
    work = arguments.work.absolute()
    more = [] if arguments.updates is None else [f"train.updates={arguments.updates}"]
    base = work / "base"
    if not (base / "build.json").is_file():
        script = ROOT / "scripts" / "build_recall_base.py"
        subprocess.run([sys.executable, str(script), "--out", str(base)], check=True)
    cells = ResultCache(
        work / "cells", lambda cell: settings_of(load_config(CONFIG, [*ARMS[cell.arm], *more]))
    )
    wanted = [
        Cell(arm, seed)
        for seed in range(arguments.seeds)
        for arm in arguments.arms
        if arm != CONTROL or seed == 0
    ]
    try:
        found = play_missing(wanted, cells, lambda cell: play(cell, work, base, more), tell=note)
    except DartError as error:
        raise SystemExit(f"error: {error}") from None
    report = {
        "benchmark": "history",
        "model": json.loads((base / "build.json").read_text()),
        "arms": {
            arm: together([found[cell] for cell in wanted if cell.arm == arm])
            for arm in arguments.arms
        },
    }
    print(json.dumps(report))


def play(cell: Cell, work: Path, base: Path, more: Sequence[str]) -> Result:
    """Train and judge one run."""
    sets = overrides(
        [
            *(*ARMS[cell.arm], *more, f"run.dir={work / cell.name}", f"run.seed={cell.seed}"),
            f'model.path="{base}"',
        ]
    )
    log = work / "logs" / f"{cell.name}.log"
    call_within(DEADLINE_S, [*dart("up", str(CONFIG)), *sets], log, ROOT)
    judged = call([*dart("eval", str(CONFIG), "--mode", "sampled", "--json"), *sets], log, ROOT)
    return {
        "passed": passes(judged["sampled_tasks"]),
        "tokens": count_tokens(work / cell.name, base),
    }


def passes(score: dict[str, Any]) -> dict[str, list[int]]:
    """Task -> [passed, judged]; every task has the same number of episodes."""
    each = (score["episodes"] + score["invalid"]) // len(score["per_task"])
    return {task: [round(rate * each), each] for task, rate in score["per_task"].items()}


def together(results: Sequence[Result]) -> Result:
    """Success of an arm over its seeds, by task and overall with Wilson's interval, and its tokens."""
    tasks = sorted(results[0]["passed"])
    by_task = {
        task: [sum(result["passed"][task][part] for result in results) for part in (0, 1)]
        for task in tasks
    }
    passed, judged = (sum(counts[part] for counts in by_task.values()) for part in (0, 1))
    return {
        "success": round(passed / judged, 4),
        "interval": [round(side, 4) for side in wilson(passed, judged)],
        "episodes": judged,
        "by_seed": [round(_rate(result["passed"].values()), 4) for result in results],
        "by_task": {task: round(part / whole, 4) for task, (part, whole) in by_task.items()},
        "tokens": {
            key: sum(result["tokens"][key] for result in results) for key in results[0]["tokens"]
        },
    }


def _rate(counts: Iterable[Sequence[int]]) -> float:
    pairs = list(counts)
    return sum(passed for passed, _ in pairs) / sum(judged for _, judged in pairs)


# --- tokens ---------------------------------------------------------------------------------


def count_tokens(run_dir: Path, model: Path) -> dict[str, int]:
    """Tokens of all recorded prompts and completions of a run, alone and by exact prefix.

    `prefill_alone`: of every prompt. `prefill_episode`: without each prompt's longest common beginning
    with the prompts and completions of its episode before it. `prefill_group`: likewise of its whole
    group, whose episodes begin with the same screen. Screens are compared by content.
    """
    vocabulary = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    image = next(
        token["id"] for token in vocabulary["added_tokens"] if token["content"] == IMAGE_TOKEN
    )
    names = (
        "prefill_alone",
        "prefill_episode",
        "prefill_group",
        "sampled",
        "steps",
        "trajectories",
    )
    counts = dict.fromkeys(names, 0)
    groups: dict[str, set[int]] = {}
    with open_reader(run_dir) as reader:
        for trajectory in reader.trajectories():
            steps = reader.steps(trajectory.id)
            of_episode: set[int] = set()
            of_group = groups.setdefault(trajectory.group_id, set())
            for step in steps:
                prompt = list(distinct(step, image))
                beginnings = list(prefixes([*prompt, *step.sampled.token_ids]))
                counts["prefill_alone"] += len(prompt)
                for key, known in (("prefill_episode", of_episode), ("prefill_group", of_group)):
                    counts[key] += sum(each not in known for each in beginnings[: len(prompt)])
                    known.update(beginnings)
                counts["sampled"] += len(step.sampled.token_ids)
            counts["steps"] += len(steps)
            counts["trajectories"] += bool(steps)
    return counts


def prefixes(tokens: Iterable[object]) -> Iterator[int]:
    """Yield a number for each beginning of the tokens, the same for the same beginning."""
    key = 0
    for token in tokens:
        key = hash((key, token))
        yield key


def distinct(step: StepRow, image: int) -> Iterator[object]:
    """Yield the prompt's tokens; those of screens with the screen they show."""
    hashes = iter(step.image_hashes)
    shown, inside = "", False
    for token in step.prompt_token_ids:
        if token == image and not inside:
            shown = next(hashes)
        inside = token == image
        yield (token, shown) if inside else token


def note(text: str) -> None:
    """Progress, beside the result."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
