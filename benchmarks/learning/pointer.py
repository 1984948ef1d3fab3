"""Pointing against writing numbers: grounding from the same data in the same time, then reinforcement learning.

    python benchmarks/learning/pointer.py --work runs/bench-pointer [--seeds 0 1 2] [--seconds 60]
        [--arms grounding acting rl parity] [--out benchmarks/results/pointer.json]

Of each seed, by `dart tune` and `dart eval grounding` on a set drawn from suite mini:

    base           a tiny model with cells of 14 pixels that knows words and no places (pointer_base.py)
    text           it learns to write coordinates, for --seconds of CPU
    pointer        it learns to point, on the same data in the same time
    pointer-half, pointer-fifth   the same in a part of the time: is it as good as text in all of it?
    lite           the head alone, on the frozen base, in the same time (LiteTrain). The base knows no actions, so its
                   pointers are forced, as published: one pass over the right answer, not `dart eval grounding`
    pointer-more   as `pointer`, with a verifier's CPU seconds added to its own: the control of the next two
    verifier       a verifier of the same base and time, which sees a crop around the place, judges the candidates
                   of `pointer`
    verifier-screen   the same with the whole screenshot in place of the crop

hit@1 on the size that was trained (`test`), and on sizes that never were, larger and of another aspect
(`test_layout`). The limit of a hit rate is 1; a click anywhere hits `chance`.

    acts-text, acts-pointer    the base learns to act from the oracle's episodes of configs/quickstart.toml, the same ones
                               with numbers and with pointers, for --act-seconds of CPU; acts-pointer-quarter and -half
                               for a part of them; held-out success, sampled
    rl-text, rl-pointer        reinforcement learning on the same tasks from `acts-text`, and from the pointer folder
                               whose success is nearest to it; success sampled and greedy (by the centre of regions)
    rl-text-grounded, rl-pointer-grounded   the same from `text`, and from the pointer folder whose hit@1 on `test` is
                               nearest to it: they can point, and have never seen a task
    parity                engine and trainer on `pointer`, before and after live updates (benchmarks/exactness/parity.py)

Results and folders are kept in --work: a study that was stopped goes on. CPU seconds are of the training
process, so that other work on the machine counts little. The last line is JSON; None is not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.curation_arms import GRPO, Arm  # noqa: E402
from benchmarks.learning.curation_study import Study, play_run  # noqa: E402
from benchmarks.learning.curves import isotonic, reach  # noqa: E402
from benchmarks.learning.study import Cell, Result, ResultCache, call, dart, play_missing  # noqa: E402
from dart_cli.algo.regions import regions  # noqa: E402 - after the path
from dart_cli.algo.statistics import interval_of_mean  # noqa: E402
from dart_cli.grounding.formats import grounding_config  # noqa: E402
from dart_cli.grounding.reader import read_set  # noqa: E402
from dart_cli.policy.forward import image_features, last_hidden  # noqa: E402
from dart_cli.policy.loader import load_policy  # noqa: E402
from dart_cli.tune.examples import Examples, PointerAnswers  # noqa: E402
from dart_cli.tune.loss import LossSettings, collate_batch  # noqa: E402

VERIFIERS = {
    "verifier": (),  # a crop of a third of the screen, the default
    "verifier-screen": ("--reach", "500"),
}
"""What each sees."""
POINTERS = ("pointer", "pointer-more", "pointer-half", "pointer-fifth")
GROUNDING = ("base", "text", *POINTERS, "lite", *VERIFIERS)
SHARES = {"pointer-more": 2.0, "pointer-half": 0.5, "pointer-fifth": 0.2}
"""Of --seconds; of all others 1."""
ACTING = {
    "acts-text": 1.0,
    "acts-pointer-quarter": 0.25,
    "acts-pointer-half": 0.5,
    "acts-pointer": 1.0,
}
"""Share of --act-seconds of each."""
RL = ("rl-text", "rl-pointer")
GROUNDED = ("rl-text-grounded", "rl-pointer-grounded")
SPLITS = ("test", "test_layout")
LEVEL = 0.85
"""Held-out success that the RL arms shall reach."""
POINTING = ("--set", "policy.pointing=pointer")
QUICKSTART = "configs/quickstart.toml"


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    work: Path
    seconds: float  # CPU, of an arm
    base_seconds: float
    rows: int  # of the training set
    items: int  # of each test split
    batch: int
    lr: float
    head_share: float
    act_seconds: float  # CPU, of learning to act
    demonstrations: int  # of each task
    trajectories: int  # of an RL run
    episodes: int  # of each of its points

    def settings(self, cell: Cell) -> object:
        """Return what a cell's result depends on."""
        own = {"seconds": self.seconds, "base_seconds": self.base_seconds, "rows": self.rows}
        own |= {"items": self.items, "batch": self.batch, "lr": self.lr}
        if cell.arm in RL or cell.arm in ACTING:
            own |= {"act_seconds": self.act_seconds, "demonstrations": self.demonstrations}
            own |= {"episodes": self.episodes}
        if cell.arm in RL or cell.arm in GROUNDED:
            own |= {"trajectories": self.trajectories, "episodes": self.episodes}
        return own | {"head_share": self.head_share}

    def folder(self, arm: str, seed: int) -> Path:
        """Return a model's."""
        return self.work.absolute() / "models" / f"{arm}-{seed}"

    def log(self, cell: Cell) -> Path:
        """Of all that its processes print."""
        return self.work / "logs" / f"{cell.name}.log"

    @property
    def set(self) -> Path:
        """The grounding set."""
        return self.work.absolute() / "set"


def main() -> None:
    """Play what is missing, then tell all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--work", type=Path, default=Path("runs/bench-pointer"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--arms",
        nargs="+",
        default=["grounding", "acting", "rl", "parity"],
        help="grounding, acting, rl, grounded, parity, or single ones of "
        f"{', '.join((*GROUNDING, *ACTING, *RL, *GROUNDED))}",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="CPU seconds of an arm")
    parser.add_argument("--base-seconds", type=float, default=25.0)
    parser.add_argument("--rows", type=int, default=3000, help="training rows")
    parser.add_argument("--items", type=int, default=200, help="of each test split")
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--head-share", type=float, default=0.2)
    parser.add_argument("--act-seconds", type=float, default=180.0, help="CPU seconds, see above")
    parser.add_argument("--demonstrations", type=int, default=100, help="of each task")
    parser.add_argument("--trajectories", type=int, default=6016, help="of an RL run")
    parser.add_argument("--episodes", type=int, default=240, help="of each of its points")
    parser.add_argument("--out", type=Path)
    asked = vars(parser.parse_args())
    arms, seeds, out = asked.pop("arms"), asked.pop("seeds"), asked.pop("out")
    plan = Plan(**asked)
    plan.work.mkdir(parents=True, exist_ok=True)
    wanted = [arm for arm in GROUNDING if arm in arms or "grounding" in arms]
    wanted += [arm for arm in ACTING if arm in arms or "acting" in arms]
    wanted += [arm for arm in RL if arm in arms or "rl" in arms]
    wanted += [arm for arm in GROUNDED if arm in arms or "grounded" in arms]
    wanted += ["parity"] if "parity" in arms else []
    cells = [Cell(arm, seed) for seed in seeds for arm in wanted]
    cache = ResultCache(plan.work / "cells", plan.settings)
    make_set(plan)
    play_missing(
        cells, cache, lambda cell: play(plan, cell), tell=lambda text: print(text, flush=True)
    )
    known = [
        Cell(arm, seed) for seed in seeds for arm in (*GROUNDING, *ACTING, *RL, *GROUNDED, "parity")
    ]
    found = {cell: result for cell in known if (result := cache.get(cell)) is not None}
    line = json.dumps(summarise(plan, found)).replace(str(plan.work.absolute()), "WORK")
    if out:
        out.write_text(line + "\n", encoding="utf-8")
    print(line)


def make_set(plan: Plan) -> None:
    """Draw the grounding set, unless it is there."""
    if plan.set.exists():
        return
    draft = plan.set.with_name("set.draft")
    shutil.rmtree(draft, ignore_errors=True)
    script = [sys.executable, str(ROOT / "scripts" / "make_grounding_set.py"), "--envs", "mini"]
    sizes = ["--train", str(plan.rows), "--items", str(plan.items)]
    call([*script, *sizes, "--out", str(draft)], plan.work / "logs" / "set.log", ROOT)
    draft.rename(plan.set)


def play(plan: Plan, cell: Cell) -> Result:
    """Measure one cell; what it starts from is made if it is not there."""
    if cell.arm == "parity":
        return {"max": parity(plan, cell)}
    if cell.arm in ACTING:
        return acting(plan, cell)
    if cell.arm in RL:
        return rl(plan, cell)
    if cell.arm in GROUNDED:
        return grounded_rl(plan, cell)
    model = base(plan, cell) if cell.arm == "base" else train(plan, cell)
    if cell.arm == "base":
        return json.loads((model / "build.json").read_text())
    record = json.loads((model / "tune.json").read_text())
    told = {name: record[name] for name in ("updates", "seconds", "examples")}
    if cell.arm in VERIFIERS:
        pointing = train(plan, Cell("pointer", cell.seed))
        options = [*POINTING, "--candidates", "20", "--verifier", str(model)]
        return {**told, **hits(plan, cell, pointing, options)}
    if cell.arm == "lite":
        return {**told, **{split: forced(model, plan.set / split) for split in SPLITS}}
    return {**told, **hits(plan, cell, model, POINTING if cell.arm != "text" else ())}


def base(plan: Plan, cell: Cell) -> Path:
    """Where all arms of a seed begin."""
    folder = plan.folder("base", cell.seed)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        script = [sys.executable, str(ROOT / "benchmarks" / "learning" / "pointer_base.py")]
        sizes = ["--seed", str(cell.seed), "--seconds", str(plan.base_seconds)]
        call([*script, *sizes, "--out", str(folder)], plan.log(cell), ROOT)
    return folder


def with_head(plan: Plan, cell: Cell) -> Path:
    """Return the base with a pointer head that has learned nothing."""
    folder = plan.folder("base-pointer", cell.seed)
    if not folder.exists():
        add = dart("model", "add-pointer", str(base(plan, cell)), str(folder))
        call_text([*add, "--seed", str(cell.seed)], plan.log(cell))
    return folder


def train(plan: Plan, cell: Cell) -> Path:
    """Return the folder of an arm; a training that was stopped goes on."""
    folder = plan.folder(cell.arm, cell.seed)
    if folder.exists():
        return folder
    begin, data, options = base(plan, cell), plan.set / "train", []
    if cell.arm in VERIFIERS:
        data = plan.work.absolute() / f"rows-{cell.arm}"
        if not data.exists():
            draft = data.with_name(f"{data.name}.draft")
            shutil.rmtree(draft, ignore_errors=True)
            asked = ["--radius", "5", "--width", "2", "--prompt", "red circle on {instruction}"]
            asked += VERIFIERS[cell.arm]
            make = [*dart("model", "verifier-rows", str(plan.set / "train"), str(draft)), *asked]
            told = call_text(make, plan.log(cell))
            print(told, flush=True)
            draft.rename(data)
    elif cell.arm != "text":
        begin = with_head(plan, cell)
        share = 1.0 if cell.arm == "lite" else plan.head_share
        options += [*POINTING, *sets(head_share=share)]
    seconds = plan.seconds * SHARES.get(cell.arm, 1.0)
    options += sets(seconds=seconds, batch=plan.batch, lr=plan.lr)
    options += ["--set", f"run.seed={cell.seed}", "--json"]
    places = ["--data", str(data), "--model", str(begin), "--out", str(folder)]
    call([*dart("tune"), *places, *options], plan.log(cell), ROOT)
    return folder


def sets(**tune: object) -> list[str]:
    """Options that set keys of [tune]."""
    return [word for key, value in tune.items() for word in ("--set", f"tune.{key}={value}")]


def call_text(command: Sequence[str], log: Path) -> str:
    """Run a command that ends in text; what it printed. Raises ChildError if it fails."""
    code = "import json,subprocess,sys;print(json.dumps(subprocess.run(sys.argv[1:],check=True,"
    code += "stdout=subprocess.PIPE,text=True).stdout))"
    told: Any = call([sys.executable, "-c", code, *command], log, ROOT)
    return str(told).strip()


def hits(plan: Plan, cell: Cell, model: Path, options: Sequence[str]) -> Result:
    """Scores of a model on each split."""
    found: Result = {}
    for split in SPLITS:
        out = plan.work.absolute() / "evaluations" / f"{cell.name}-{split}"
        asked = ["--model", str(model), "--out", str(out), "--misses", "0", "--json", *options]
        told = call(
            [*dart("eval", "grounding", str(plan.set / split)), *asked], plan.log(cell), ROOT
        )
        keys = ("hit_1", "interval", "hit_3", "overlap_1", "n", "chance")
        found[split] = {key: told[key] for key in keys}
        if "without_verifier" in told:
            found[split]["without_verifier"] = told["without_verifier"]["hit_1"]
    return found


@torch.inference_mode()
def forced(folder: Path, data: Path) -> Result:
    """hit@1 and hit@3 of a folder's regions where the answer up to its pointer is given."""
    told = read_set(data).items
    pointing = ['policy.pointing="pointer"']
    config, answers = grounding_config(str(folder), "", pointing, refusals=False)
    policy = load_policy(folder, pointing="pointer")
    head, merge = policy.pointer_head, policy.images.merge
    assert head is not None
    examples = Examples(policy, config, told, PointerAnswers(policy, config, answers))
    found = [0, 0]
    for index, item in enumerate(told):
        batch = collate_batch(policy, [examples.of(index)], LossSettings())
        features = image_features(policy.model, batch.inputs.images)
        states = last_hidden(policy.model, batch.inputs, last=batch.last, features=features)
        logits = head(features.embeds[0], states[0, batch.pads[:, 1]])[0]
        _, rows, columns = batch.inputs.images[0].grid
        p = logits.double().softmax(dim=0).reshape(rows // merge, columns // merge).numpy()
        best = regions(p, top=3)
        wide, high = item.size
        assert item.region is not None
        inside = [item.region.contains((each.x * wide, each.y * high)) for each in best]
        found = [found[0] + inside[0], found[1] + any(inside)]
    return {"hit_1": found[0] / len(told), "hit_3": found[1] / len(told), "n": len(told)}


def acting(plan: Plan, cell: Cell) -> Result:
    """Held-out success of a folder that learned from the oracle's episodes."""
    model = actor(plan, cell)
    record = json.loads((model / "tune.json").read_text())
    told = {name: record[name] for name in ("updates", "seconds", "examples")}
    asked = ["--model", str(model), "--episodes", str(plan.episodes), "--mode", "sampled", "--json"]
    place = ["--set", f"run.dir={plan.work.absolute() / 'acting' / cell.name}"]
    points = POINTING if "pointer" in cell.arm else ()
    found = call([*dart("eval", QUICKSTART), *asked, *place, *points], plan.log(cell), ROOT)
    return told | {key: found["sampled_tasks"][key] for key in ("success", "interval", "episodes")}


def actor(plan: Plan, cell: Cell) -> Path:
    """Return the folder of an acting arm; a training that was stopped goes on."""
    folder = plan.folder(cell.arm, cell.seed)
    if folder.exists():
        return folder
    points = "pointer" in cell.arm
    begin, options = (with_head if points else base)(plan, cell), POINTING if points else ()
    shown = plan.work.absolute() / f"demonstrations-{'pointer' if points else 'text'}"
    if not shown.exists():
        draft = shown.with_name(f"{shown.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        asked = ["--per-task", str(plan.demonstrations), "--out", str(draft), "--json"]
        asked += ["--set", f"run.dir={plan.work.absolute() / 'collecting'}"]
        asked += ["--set", f"model.path={begin}"]
        call([*dart("data", "collect", QUICKSTART), *asked, *options], plan.log(cell), ROOT)
        draft.rename(shown)
    keys = sets(seconds=plan.act_seconds * ACTING[cell.arm], batch=2 * plan.batch, lr=plan.lr)
    keys += ["--set", f"run.seed={cell.seed}", "--json"]
    places = ["--data", str(shown), "--model", str(begin), "--out", str(folder)]
    call([*dart("tune"), *places, *keys, *options], plan.log(cell), ROOT)
    return folder


def rl(plan: Plan, cell: Cell) -> Result:
    """Return a run of the quickstart's tasks from a folder that acts."""

    def success(arm: str) -> float:
        return float(measured(plan, Cell(arm, cell.seed))["success"])

    chosen, goal = "acts-text", success("acts-text")
    if cell.arm == "rl-pointer":
        chosen = nearest([arm for arm in ACTING if "pointer" in arm], success, goal)
    model = actor(plan, Cell(chosen, cell.seed))
    return {"begins_at": success(chosen), **learned(plan, cell, model, chosen)}


def grounded_rl(plan: Plan, cell: Cell) -> Result:
    """Return a run of the quickstart's tasks from a folder that was trained on places alone."""

    def hit(arm: str) -> float:
        return float(measured(plan, Cell(arm, cell.seed))["test"]["hit_1"])

    chosen, goal = "text", hit("text")
    if cell.arm == "rl-pointer-grounded":
        chosen = nearest(["pointer-fifth", "pointer-half", "pointer"], hit, goal)
    model = train(plan, Cell(chosen, cell.seed))
    return {"begins_at": hit(chosen), **learned(plan, cell, model, chosen)}


def measured(plan: Plan, cell: Cell) -> Result:
    """Return the result of a cell, from the cache if it is there."""
    return ResultCache(plan.work / "cells", plan.settings).get(cell) or play(plan, cell)


def nearest(arms: Sequence[str], of: Callable[[str], float], goal: float) -> str:
    """Return the arm whose figure is nearest to `goal`; no more are measured once one is above it."""
    found: dict[str, float] = {}
    for arm in arms:
        found[arm] = of(arm)
        if found[arm] > goal:
            break
    return min(found, key=lambda arm: abs(found[arm] - goal))


def learned(plan: Plan, cell: Cell, model: Path, begins_with: str) -> Result:
    """Return a run of the quickstart's tasks."""
    sets = [f"model.path={model}"]
    if "pointer" in cell.arm:
        sets.append('policy.pointing="pointer"')
    study = Study(ROOT, ROOT / QUICKSTART, plan.work / cell.name, tuple(sets))
    arm = Arm(GRPO, budget=plan.trajectories)
    result = play_run(study, arm, cell.seed, episodes=plan.episodes, greedy=2 * plan.episodes)
    return {"begins_with": begins_with, **result}


def parity(plan: Plan, cell: Cell) -> float:
    """Largest difference of a log-probability between engine and trainer, nats, over live updates."""
    from benchmarks.exactness.parity import compare, settings
    from dart_cli.config.load import config_of_model
    from dart_cli.weights.file import FileChannel

    model = train(plan, Cell("pointer", cell.seed))
    sets = [
        *settings("transformers", 4),
        'policy.pointing="pointer"',
        'policy.action_parser="compact"',
    ]
    config = config_of_model(model, [*sets, 'policy.coordinates="thousandths"'])
    with tempfile.TemporaryDirectory(prefix="dart-pointer-") as scratch:
        compared = asyncio.run(compare(config, 4, FileChannel(Path(scratch))))
    found: float = compared.as_json()["max_abs_logprob_diff"]
    return found


# --- what is told ----------------------------------------------------------------------------


def summarise(plan: Plan, found: Mapping[Cell, Result]) -> dict[str, Any]:
    """Means over seeds, and every run."""

    def of(arm: str) -> list[Result]:
        return [result for cell, result in found.items() if cell.arm == arm]

    def hit(arm: str) -> dict[str, float] | None:
        runs = of(arm)
        return {s: round(mean(r[s]["hit_1"] for r in runs), 4) for s in SPLITS} if runs else None

    def success(arm: str) -> dict[str, Any] | None:
        runs = of(arm)
        if not runs:
            return None
        curves = [isotonic([(p["trajectories"], p["success"]) for p in r["points"]]) for r in runs]
        return {
            "begins_with": [run["begins_with"] for run in runs],
            "begins_at": [run["begins_at"] for run in runs],
            "success": round(mean(run["points"][-1]["success"] for run in runs), 4),
            f"trajectories_to_{LEVEL}": [reach(curve, LEVEL) for curve in curves],
        }

    runs = {cell.name: result for cell, result in found.items() if cell.arm != "base"}
    parities = [result["max"] for result in of("parity")]
    return {
        "benchmark": "pointer",
        "seeds": sorted({cell.seed for cell in found}),
        "cpu_seconds": plan.seconds,
        "grounding_text": hit("text"),
        "grounding_pointer": hit("pointer"),
        "grounding_pointer_half": hit("pointer-half"),
        "grounding_lite": hit("lite"),
        "grounding_verified": hit("verifier"),
        "acting": {arm: [round(run["success"], 4) for run in of(arm)] for arm in ACTING if of(arm)},
        "rl_success_text": success("rl-text"),
        "rl_success_pointer": success("rl-pointer"),
        "rl_success_text_grounded": success("rl-text-grounded"),
        "rl_success_pointer_grounded": success("rl-pointer-grounded"),
        "parity_max": max(parities) if parities else None,
        "verifier_effect": verifier_effect(found),
        "runs": runs,
    }


def verifier_effect(found: Mapping[Cell, Result]) -> dict[str, Any] | None:
    """Each verifier against the pointer that had its CPU seconds too; None before a seed has both.

    `interval`: 95 % of the mean difference, by drawing seeds with replacement.
    """
    seeds = sorted({cell.seed for cell in found if cell.arm == "pointer-more"})
    seeds = [seed for seed in seeds if Cell("verifier", seed) in found]
    if not seeds:
        return None
    told: dict[str, Any] = {"seeds": seeds}
    for name, split in (("trained_sizes", "test"), ("other_sizes", "test_layout")):

        def hits_of(arm: str, split: str = split) -> list[float]:
            cells = [Cell(arm, seed) for seed in seeds]
            return [found[cell][split]["hit_1"] for cell in cells if cell in found]

        control = hits_of("pointer-more")
        rows: dict[str, Any] = {"hit_pointer_more_seconds": round(mean(control), 4)}
        if alone := hits_of("pointer"):
            rows["hit_pointer"] = round(mean(alone), 4)
        for arm in VERIFIERS:
            if len(verified := hits_of(arm)) == len(seeds):
                apart = [one - other for one, other in zip(verified, control, strict=True)]
                rows[f"hit_{arm}"] = round(mean(verified), 4)
                rows[f"{arm}_difference"] = {
                    "value": round(mean(apart), 4),
                    "interval": interval_of_mean(apart, seed=0),
                    "by_seed": [round(each, 4) for each in apart],
                }
        told[name] = rows
    return told


if __name__ == "__main__":
    main()
