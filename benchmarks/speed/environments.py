"""How fast real environments step and reset, and what a slot costs in memory, by number of slots.

    python benchmarks/speed/environments.py --suite miniwob|desktop [--slots 1 4 8 16] [--seconds 10]
        [--tasks ID ...] [--steps 5] [--out benchmarks/results/environments.json]

Each slot plays in a thread of its own, as in `dart env`: one task after the other, each of its own
seed, at most `--steps` random clicks and no policy to wait for. The steps a second are those of whole
episodes, so resets and page loads count in, and longer episodes give more of them. Resets are timed
apart: to the task that is loaded already, as in a group of trajectories, and to another one. Memory is the proportional set size of
this process and all it started, less what it was before the first slot.

For miniwob the baselines are the package's own selenium environment (needs chromedriver: apt install
chromium-driver) and Playwright (pip install playwright) with the same browser, the same tasks and the
same clicks, at one slot. All need a frame for each step and a picture of it: the physical limit is
`screenshot_ms`, of a page that does not change. The last line is one JSON object.

For desktop, each reset is to another task and to a fresh desktop, so that what counts is the reset of
each application (`resets`) and how many settled steps a slot takes a second while it plays, resets left
out (`played_per_second`). The limit is `settle_ms`, for which the screen must have stood still.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bus.errors import EnvError
from envs.contract.actions import Click
from envs.contract.base import GuiEnv, Observation
from envs.contract.registry import load_suite, make_env
from envs.suites.miniwob.browser import BrowserHost
from envs.tools.chromium import find_chromium
from envs.tools.miniwob_pages import find_pages
from envs.tools.process_tree import descendants

MIX = {
    "miniwob": ["click-test-2", "click-color", "enter-text", "use-slider", "login-user"],
    "desktop": ["calc-sum", "mousepad-replace-word", "writer-append", "pcmanfm-move"],
}
EPISODES = {"miniwob": 8}  # of a task, as in a group, before the next one
CHROMEDRIVER = Path("/usr/bin/chromedriver")


@dataclass
class SlotCounts:
    """What one slot did."""

    steps: int = 0
    broken: int = 0  # episodes
    same_s: list[float] = field(default_factory=list)  # resets to the same task
    other_s: list[float] = field(default_factory=list)  # resets to another task
    step_s: list[float] = field(default_factory=list)
    by_task: dict[str, list[float]] = field(default_factory=dict)  # all resets, seconds


@dataclass(frozen=True)
class Work:
    """What each slot plays: `group` episodes of a task before the next, of `steps` clicks at most."""

    suite: str
    tasks: Sequence[str]
    group: int
    steps: int


def play(env: GuiEnv, work: Work, slot: int, until: float, counts: SlotCounts) -> None:
    """Random clicks until the time is up."""
    rng, episode = Random(slot), 0

    def reset(task: str) -> Observation:
        began = time.monotonic()
        screen, _ = env.reset(seed=1000 * slot + episode, options={"task": task})
        took = time.monotonic() - began
        (counts.other_s if episode % work.group == 0 else counts.same_s).append(took)
        counts.by_task.setdefault(task, []).append(took)
        return screen

    def clicks(screen: Observation) -> None:
        for _ in range(work.steps):
            x, y = rng.randrange(screen.width), rng.randrange(screen.height)
            began = time.monotonic()
            over = env.step(Click(x=x, y=y))[2]
            counts.step_s.append(time.monotonic() - began)
            counts.steps += 1
            if over or time.monotonic() > until:
                return

    while time.monotonic() < until:
        try:
            clicks(reset(work.tasks[(slot + episode // work.group) % len(work.tasks)]))
        except EnvError as error:
            print(f"slot {slot}: {error}", flush=True)
            counts.broken += 1
        episode += 1


def measure(work: Work, slots: int, seconds: float) -> dict[str, Any]:
    """Measure the steps in a second, the resets and the memory of `slots` environments at once."""
    before, tasks = memory_mb(), work.tasks
    envs = [make_env(work.suite) for _ in range(slots)]
    try:
        for slot, env in enumerate(envs):  # the first reset starts what is to be started
            env.reset(seed=slot, options={"task": tasks[slot % len(tasks)]})
        memory = memory_mb() - before  # every slot has its page or application
        counts = [SlotCounts() for _ in envs]
        began = time.monotonic()
        until = began + seconds
        threads = [
            threading.Thread(target=play, args=(env, work, slot, until, counts[slot]))
            for slot, env in enumerate(envs)
        ]
        for thread in threads:
            thread.start()
        time.sleep(seconds / 2)
        memory = max(memory, memory_mb() - before)
        for thread in threads:
            thread.join()
        spent = time.monotonic() - began
    finally:
        for env in envs:
            env.close()
    same = [each for slot in counts for each in slot.same_s]
    other = [each for slot in counts for each in slot.other_s]
    same = same or other  # each reset is to another task
    steps = [each for slot in counts for each in slot.step_s]
    resets = {
        task: [each for slot in counts for each in slot.by_task.get(task, [])] for task in tasks
    }
    return {
        "slots": slots,
        "steps_per_second": round(sum(each.steps for each in counts) / spent, 1),
        "reset_p50_ms": round(1000 * quantile(same, 0.5), 1),
        "reset_p95_ms": round(1000 * quantile(same, 0.95), 1),
        "other_task_p50_ms": round(1000 * quantile(other, 0.5), 1),
        "other_task_p95_ms": round(1000 * quantile(other, 0.95), 1),
        "memory_per_slot_mb": round(memory / slots, 1),
        "played_per_second": round(len(steps) / (sum(steps) or float("nan")), 2),  # of a slot
        "broken_episodes": sum(each.broken for each in counts),
        "resets": {
            task: {
                "p50_ms": round(1000 * quantile(spent, 0.5)),
                "p95_ms": round(1000 * quantile(spent, 0.95)),
                "count": len(spent),
            }
            for task, spent in resets.items()
            if spent
        },
    }


def screenshot_ms(seconds: float) -> float:
    """Median of the browser's screenshot alone, of a page that does not change."""
    host = BrowserHost(find_chromium, find_pages, 1.0, "png", 20.0)
    host.join()
    try:
        page = host.take("click-test-2")
        page.load("click-test-2")
        spent: list[float] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            began = time.monotonic()
            page.look()
            spent.append(time.monotonic() - began)
    finally:
        host.leave()
    return round(1000 * statistics.median(spent), 2)


def measure_selenium(work: Work, seconds: float) -> dict[str, float] | None:
    """Measure the same pages as `measure`, with miniwob's own environment, one slot; None without chromedriver."""
    if not CHROMEDRIVER.exists():
        return None
    warnings.simplefilter("ignore")
    os.environ["MINIWOB_CHROME_BINARY"] = str(find_chromium())
    os.environ["MINIWOB_CHROMEDRIVER"] = str(CHROMEDRIVER)
    import gymnasium
    import miniwob
    from miniwob.action import ActionTypes

    gymnasium.register_envs(miniwob)
    rng, tasks, steps, resets, spent = Random(0), work.tasks, 0, [], 0.0
    for task in tasks:
        env: Any = gymnasium.make(f"miniwob/{task.removeprefix('miniwob/')}-v1")
        try:
            env.reset(seed=0)
            began, episode = time.monotonic(), 0
            until = began + seconds / len(tasks)
            while time.monotonic() < until:
                started = time.monotonic()
                env.reset(seed=episode)
                resets.append(time.monotonic() - started)
                episode += 1
                for _ in range(work.steps):
                    at = [float(rng.randrange(160)), float(rng.randrange(210))]
                    click = env.unwrapped.create_action(ActionTypes.CLICK_COORDS, coords=at)
                    over = env.step(click)[2]
                    steps += 1
                    if over or time.monotonic() > until:
                        break
            spent += time.monotonic() - began
        finally:
            env.close()
    return {
        "steps_per_second": round(steps / spent, 1),
        "reset_p50_ms": round(1000 * quantile(resets, 0.5), 1),
    }


START = """seed => {
    if (core.EP_TIMER !== null) core.endEpisode(0);
    Math.seedrandom(seed);
    core.EPISODE_MAX_TIME = 1e6;
    core.startEpisodeReal();
}"""


def measure_playwright(work: Work, seconds: float) -> dict[str, float] | None:
    """Measure the same pages as `measure`, through Playwright, one slot; None where that is not installed."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    rng, tasks, steps, resets, spent = Random(0), work.tasks, 0, [], 0.0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(find_chromium()))
        try:
            page = browser.new_page(viewport={"width": 160, "height": 210})
            for task in tasks:
                page.goto((find_pages() / f"{task.removeprefix('miniwob/')}.html").as_uri())
                page.wait_for_function("typeof core !== 'undefined' && core.cover_div !== null")
                began, episode = time.monotonic(), 0
                until = began + seconds / len(tasks)
                while time.monotonic() < until:
                    started = time.monotonic()
                    page.evaluate(START, str(episode))
                    page.screenshot()
                    resets.append(time.monotonic() - started)
                    episode += 1
                    for _ in range(work.steps):
                        page.mouse.click(rng.randrange(160), rng.randrange(210))
                        over = page.evaluate("WOB_DONE_GLOBAL")
                        page.screenshot()
                        steps += 1
                        if over or time.monotonic() > until:
                            break
                spent += time.monotonic() - began
        finally:
            browser.close()
    return {
        "steps_per_second": round(steps / spent, 1),
        "reset_p50_ms": round(1000 * quantile(resets, 0.5), 1),
    }


def memory_mb() -> float:
    """Proportional set size of this process and its descendants, MB."""
    total = 0
    for pid in (os.getpid(), *descendants(os.getpid())):
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += next(int(line.split()[1]) for line in rollup.splitlines() if line[:4] == "Pss:")
    return total / 1024


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of `values` do not exceed."""
    ordered = sorted(values) or [float("nan")]
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def main() -> None:
    """Measure, print a table, and end in one JSON line."""
    parser = argparse.ArgumentParser(description="Benchmark of real environments.")
    parser.add_argument("--suite", default="miniwob")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=10.0, help="for each number of slots")
    parser.add_argument("--tasks", nargs="+", help="default: a mix of the suite's")
    parser.add_argument("--steps", type=int, default=5, help="of an episode, at most")
    parser.add_argument("--out", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    suite, seconds = arguments.suite, arguments.seconds
    mix = [f"{suite}/{name}" for name in MIX.get(suite, [])]
    tasks = arguments.tasks or mix or list(load_suite(suite).tasks)
    work = Work(suite, tasks, EPISODES.get(suite, 1), arguments.steps)
    rows = []
    print("slots  steps/s  reset p50  p95 | another task p50  p95, ms | MB a slot")
    for slots in arguments.slots:
        row = measure(work, slots, seconds)
        rows.append(row)
        print(
            f"{slots:5}  {row['steps_per_second']:7}  {row['reset_p50_ms']:9} "
            f"{row['reset_p95_ms']:5} | {row['other_task_p50_ms']:16} "
            f"{row['other_task_p95_ms']:5}     | {row['memory_per_slot_mb']:6}",
            flush=True,
        )
    best = max(rows, key=lambda row: row["steps_per_second"])
    result: dict[str, Any] = {
        "benchmark": "environments",
        "suite": suite,
        "steps_of_an_episode": arguments.steps,
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 1),
        "steps_per_second": best["steps_per_second"],
        "reset_p50_ms": rows[0]["reset_p50_ms"],
        "memory_per_slot_mb": rows[-1]["memory_per_slot_mb"],
        "by_slots": rows,
    }
    if suite == "miniwob":
        result["screenshot_ms"] = screenshot_ms(min(seconds, 5.0))
        single = min(rows, key=lambda row: row["slots"])
        for name, baseline in (("selenium", measure_selenium), ("playwright", measure_playwright)):
            result[name] = found = baseline(work, seconds)
            if found is not None:
                ratio = single["steps_per_second"] / found["steps_per_second"]
                result[f"{name}_ratio"] = round(ratio, 1)
                print(f"{name}, 1 slot: {found}; ratio {ratio:.1f}", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
