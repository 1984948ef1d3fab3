"""CUA-Gym's mocks and MobileGym's phone, as their users have built them, beside their own runners.

The physical limit is the time that the applications themselves compute: everything else of a step should cost
nothing. Parts, each with its folder:

    --hub FOLDER         a checkout of CUA-Gym-Hub with five built mocks (mock_bundles.py names them, and has tasks)
    --mobilegym FOLDER   a checkout of MobileGym that is built, whose bench_env the interpreter --python can load
    --python PYTHON      that interpreter; it needs Playwright

`episodes` are played two at once, by solutions and by random actions in turns. `leaks` counts what grew or was left
behind: memory (the middle of the last third above that of the second by more than a tenth and 100 MiB), processes,
temporary folders, sessions in the mocks, and first screens or verdicts of solutions that are not those of the first
episode. `verdicts_equal` of `verdicts_compared` episodes have the same reward (the same judgement) in the
upstream's way of playing the same actions (mocks_upstream.py). `steps_s_ratio` is steps a second against that
runner: MobileGym's own with its pauses; for CUA-Gym, which plays in virtual machines, Playwright that waits for an
idle network and half a second. `steps_s_ratio_unwaiting` is against the same without any wait.
`broken_tasks_found` of `broken_tasks` bundles are named by `dart env check`, with `sound_tasks_blamed` others.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.speed.mock_bundles import BROKEN, TASKS, write_folder
from dart_cli.suite_check import CheckOptions
from dart_cli.suite_check.check_suite import Check, broken_files, env_of, summary
from envs.contract.actions import Action, Click, Done, Drag, KeyPress, Scroll, Type, action_to_dict
from envs.contract.registry import make_env, select_tasks
from envs.tools.browser.process import BINARY

RESULT = "web.json"
PHONE_SCALE = 1.0
PATIENCE = {"program_s": 120.0, "deadline_s": 60.0}  # options for a machine that others share
RANDOM_STEPS = 5
SAMPLE_S = 5.0
WORDS = ("hello", "3", "report", "ok")
PHONE_TASKS: dict[str, tuple[int, Sequence[Action]]] = {
    "sms.MarkAllConversationsRead": (0, [Click(x=287, y=77)]),
    "sms.OpenConversationBySender": (0, [Click(x=180, y=350)]),
    "notes.ChangeViewMode": (0, [Click(x=317, y=79), Click(x=291, y=197)]),
    "clock.ToggleAlarm": (3, [Click(x=309, y=421)]),
    "notes.ReadNotesCount": (
        0,
        [
            KeyPress(keys=["home"]),
            Drag(path=[(300, 400), (60, 400)]),
            Click(x=53, y=381),
            Click(x=180, y=157),
            Type(text="5"),
            KeyPress(keys=["back"]),  # puts the keyboard away
            Click(x=180, y=755),
        ],
    ),
}
"""Task -> seed, and the actions that do it at 360x800."""
PHONE_OTHERS = (
    "calendar.ToggleShowWeekNumber",
    "clock.AddAlarm",
    "sms.ToggleMainSetting",
    "notes.PinNote",
)
"""Further tasks, which random actions play."""


@dataclass
class Episode:
    """An episode: what is played, and what came of it."""

    task: str
    seed: int
    actions: list[Action]
    solved: bool  # by its solution
    outcome: str = ""
    reward: float = 0.0
    reason: str = ""
    names: str = ""  # of the elements on its first screen
    seconds: float = 0.0  # of its steps


@dataclass(frozen=True)
class Game:
    """A suite, and how its episodes are planned."""

    suite: str
    options: dict[str, Any]
    plan: Callable[[int], Episode]  # the episode of a number


def cuagym_game(folder: Path) -> Game:
    """Return the game of five mocks."""

    def plan(number: int) -> Episode:
        task, turn = TASKS[number % len(TASKS)], number // len(TASKS)
        solved = turn % 2 == 0
        actions = list(task.actions) if solved else random_clicks(number)
        return Episode(f"cuagym/{task.name}", 0, actions, solved)

    return Game(f"cuagym:{folder}", dict(PATIENCE), plan)


def mobilegym_game(folder: Path, python: str) -> Game:
    """Return the game of the phone's system applications."""
    names = [*PHONE_TASKS, *PHONE_OTHERS]

    def plan(number: int) -> Episode:
        name, turn = names[number % len(names)], number // len(names)
        solved = turn % 2 == 0 and name in PHONE_TASKS
        seed, solution = PHONE_TASKS.get(name, (0, ()))
        actions = list(solution) if solved else random_gestures(number)
        return Episode(f"mobilegym/{name}", seed, actions, solved)

    options = {"python": python, "scale": PHONE_SCALE, "setup_s": 120.0, "deadline_s": 60.0}
    return Game(f"mobilegym:{folder}", options, plan)


def random_actions(
    seed: int,
    size: tuple[int, int],
    turn: Callable[[random.Random, int, int], Action],
    keys: Sequence[str],
) -> list[Action]:
    """Return random actions on a page of `size`: clicks, turns of the page by `turn`, texts and `keys`."""
    rng = random.Random(seed)
    actions: list[Action] = []
    for _ in range(RANDOM_STEPS):
        x, y = rng.randrange(size[0]), rng.randrange(size[1])
        kind = rng.random()
        if kind < 0.7:
            actions.append(Click(x=x, y=y))
        elif kind < 0.8:
            actions.append(turn(rng, x, y))
        elif kind < 0.9:
            actions.append(Type(text=rng.choice(WORDS)))
        else:
            actions.append(KeyPress(keys=[rng.choice(keys)]))
    return actions


def random_clicks(seed: int) -> list[Action]:
    """Return random actions of a mouse and a keyboard on a page of 1280x720."""
    return random_actions(
        seed,
        (1280, 720),
        lambda rng, x, y: Scroll(x=x, y=y, dy=rng.choice((-3, 3))),
        ("enter", "escape", "tab"),
    )


def random_gestures(seed: int) -> list[Action]:
    """Return random gestures on a phone of 360x800."""
    return random_actions(
        seed,
        (360, 800),
        lambda rng, _x, _y: Drag(path=[(180, 600), (180, rng.randrange(100, 500))]),
        ("back", "home"),
    )


# --- episodes, two at once ----------------------------------------------------------------------


@dataclass
class Soak:
    """The episodes of a game, played by several environments at once."""

    game: Game
    count: int
    most_s: float
    episodes: list[Episode] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    samples: list[tuple[int, float, int]] = field(default_factory=list)  # episodes, MiB, processes
    browsers: list[int] = field(default_factory=list)

    def run(self, slots: int) -> None:
        """Play, in `slots` threads with an environment each, until all are played or the time is over."""
        self._lock, self._next = threading.Lock(), 0
        self._until = time.monotonic() + self.most_s
        threads = [threading.Thread(target=self._play) for _ in range(slots)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(SAMPLE_S / slots)
            self._sample()

    def _play(self) -> None:
        env: Any = make_env(self.game.suite, **self.game.options)
        try:
            while True:
                with self._lock:
                    number, self._next = self._next, self._next + 1
                if number >= self.count or time.monotonic() > self._until:
                    return
                episode = self.game.plan(number)
                try:
                    play(env, episode)
                except Exception as error:  # noqa: BLE001 - counted, and the next episode begins
                    self.faults.append(f"{episode.task}: {type(error).__name__}: {error}")
                    continue
                with self._lock:
                    self.episodes.append(episode)
                    if len(self.episodes) % 25 == 0:
                        print(
                            f"{self.game.suite}: {len(self.episodes)} episodes, {len(self.faults)} faults",
                            flush=True,
                        )
        finally:
            env.close()

    def _sample(self) -> None:
        memory, processes = 0.0, 0
        for process in psutil.Process().children(recursive=True):
            try:
                memory += process.memory_full_info().pss / 2**20
                processes += 1
            except (psutil.Error, AttributeError):
                continue
        memory += psutil.Process().memory_info().rss / 2**20
        self.samples.append((len(self.episodes), memory, processes))


def play(env: Any, episode: Episode) -> None:
    """Play an episode and note its verdict."""
    env.reset(seed=episode.seed, options={"task": episode.task})
    # Times and numbers of a first screen change with the clock.
    episode.names = re.sub(r"[\W\d]+", "", "".join(element.name for element in env.elements()))
    if env.evaluate().outcome == "pass":
        raise RuntimeError("it is done at reset")
    began = time.perf_counter()
    for action in episode.actions:
        env.step(action)
    episode.seconds = time.perf_counter() - began
    env.step(Done())
    verdict = env.evaluate()
    episode.outcome, episode.reward, episode.reason = (
        verdict.outcome,
        verdict.reward or 0.0,
        verdict.reason,
    )


def leaks_of(soak: Soak, left_behind: Sequence[str]) -> dict[str, Any]:
    """Return what grew or was left behind, each as a number and together."""
    third = max(1, len(soak.samples) // 3)
    middle = [median_of(soak.samples[part * third : (part + 1) * third]) for part in (1, 2)]
    grew = middle[1][0] > 1.1 * middle[0][0] and middle[1][0] - middle[0][0] > 100
    firsts: dict[tuple[str, int], Episode] = {}
    states: list[str] = []
    for episode in soak.episodes:
        first = firsts.setdefault((episode.task, episode.seed), episode)
        if episode.names != first.names:
            states.append(episode.task)
    wrong = [episode for episode in soak.episodes if episode.solved and episode.outcome != "pass"]
    leaks = (
        int(grew)
        + int(middle[1][1] > middle[0][1] + 2)
        + len(left_behind)
        + len(states)
        + len(wrong)
    )
    return {
        "leaks": leaks,
        "memory_mb": [round(middle[0][0]), round(middle[1][0])],
        "processes": [middle[0][1], middle[1][1]],
        "left_behind": list(left_behind),
        "other_first_screens": sorted(set(states)),
        "solutions_that_failed": sorted({f"{e.task}: {e.outcome} {e.reason[:100]}" for e in wrong}),
    }


def median_of(samples: Sequence[tuple[int, float, int]]) -> tuple[float, float]:
    """Return the medians of memory and processes."""
    if not samples:
        return 0.0, 0.0
    return (
        statistics.median(sample[1] for sample in samples),
        statistics.median(sample[2] for sample in samples),
    )


def temporary() -> set[str]:
    """Return the names of the temporary files; the folder for them is this program's own."""
    return {path.name for path in Path(tempfile.gettempdir()).iterdir()}


def sessions(hub: Path) -> set[str]:
    """Return the sessions that the mocks of a checkout keep in their own folders."""
    return {str(path) for path in hub.glob("websites/*/.mock-*/*")}


# --- the upstream's way -------------------------------------------------------------------------


def upstream(job: dict[str, Any], python: str) -> list[dict[str, Any]]:
    """Return what mocks_upstream.py answers to a job."""
    script = Path(__file__).with_name("mocks_upstream.py")
    with tempfile.TemporaryDirectory() as scratch:
        job_file, answer = Path(scratch, "job.json"), Path(scratch, "answer.json")
        job_file.write_text(json.dumps(job), encoding="utf-8")
        variables = {**os.environ, "PYTHONPATH": ""}
        subprocess.run([python, str(script), str(job_file), str(answer)], check=True, env=variables)
        answers: list[dict[str, Any]] = json.loads(answer.read_text("utf-8"))
        return answers


def compare(game: Game, folder: Path, python: str, count: int, node: str) -> dict[str, Any]:
    """Play the same episodes here, in the upstream's way, and in that without waits; compare them."""
    episodes = [game.plan(number) for number in range(count)]
    name = game.suite.partition(":")[0]
    env: Any = make_env(game.suite, **game.options)
    try:
        for episode in episodes:
            play(env, episode)
    finally:
        env.close()
    own_s = sum(episode.seconds for episode in episodes)
    steps = sum(len(episode.actions) for episode in episodes)
    job = {
        "suite": name,
        "folder": str(folder),
        "chromium": BINARY,
        "node": node,
        "scale": PHONE_SCALE,
        "episodes": [
            {
                "task": episode.task.partition("/")[2],
                "mock": f"{episode.task.partition('/')[2].partition('-')[0]}_mock",
                "seed": episode.seed,
                "actions": [action_to_dict(action) for action in episode.actions],
            }
            for episode in episodes
        ],
    }
    waiting = upstream({**job, "idle": True}, python)
    hasty = upstream({**job, "idle": False}, python)
    differ = []
    for episode, answer in zip(episodes, waiting, strict=True):
        same = (episode.outcome == "pass") == answer["passed"]
        if name == "cuagym":
            same = same and abs(episode.reward - answer["reward"]) < 1e-9
        if not same:
            differ.append(
                f"{episode.task} ({'solution' if episode.solved else 'random'}): "
                f"{episode.outcome} {episode.reward:g} {episode.reason[:80]} / {answer}"
            )
    return {
        "verdicts_equal": len(episodes) - len(differ),
        "verdicts_compared": len(episodes),
        "verdicts_that_differ": differ,
        "passed": sum(episode.outcome == "pass" for episode in episodes),
        "steps_s": round(steps / own_s, 2),
        "upstream_steps_s": round(steps / sum(each["seconds"] for each in waiting), 2),
        "upstream_steps_s_unwaiting": round(steps / sum(each["seconds"] for each in hasty), 2),
    }


# --- broken bundles -----------------------------------------------------------------------------


def find_broken(folder: Path) -> dict[str, Any]:
    """Return how many of the broken bundles `dart env check` names."""
    import asyncio

    suite = f"cuagym:{folder}"
    options = CheckOptions(suite, seeds=1, probes="nothing,done")
    tasks = select_tasks(suite, ())
    check = Check(options, tasks)
    asyncio.run(check.play())
    report = summary(options, check.reports(), broken_files(suite))
    names = {
        line.partition(":")[0].removeprefix("cuagym/broken-") for line in report["broken_files"]
    }
    wrong = [task.removeprefix("cuagym/") for task in report["wrong"]]
    names |= {name.removeprefix("broken-") for name in wrong if name.startswith("broken-")}
    assert env_of(options).suite == suite
    return {
        "broken_tasks_found": len(names & set(BROKEN)),
        "broken_tasks": len(BROKEN),
        "broken_tasks_missed": sorted(set(BROKEN) - names),
        "sound_tasks_blamed": [name for name in wrong if not name.startswith("broken-")],
    }


def main() -> None:
    """Run the parts whose folders are given, and print one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hub", type=Path)
    parser.add_argument("--mobilegym", type=Path)
    parser.add_argument("--python", default="")
    parser.add_argument("--node", default="node")
    parser.add_argument(
        "--episodes", type=int, default=1000, help="in all: three quarters of them in mocks"
    )
    parser.add_argument(
        "--most-s", type=float, default=3600.0, help="the longest play of each suite"
    )
    parser.add_argument(
        "--compared", type=int, default=60, help="episodes of each suite that both runners play"
    )
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--parts", default="episodes,verdicts,broken")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    parts = args.parts.split(",")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mocks-") as scratch:
        temporaries = Path(scratch, "temporary")
        temporaries.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporaries)
        games: dict[str, tuple[Game, Path, int]] = {}
        if args.hub:
            sound, broken = Path(scratch, "sound"), Path(scratch, "broken")
            write_folder(sound, args.hub, broken=False)
            write_folder(broken, args.hub, broken=True)
            games["cuagym"] = (cuagym_game(sound), sound, args.episodes * 3 // 4)
        if args.mobilegym:
            game = mobilegym_game(args.mobilegym.resolve(), args.python)
            games["mobilegym"] = (game, args.mobilegym.resolve(), args.episodes // 4)
        for name, (game, folder, count) in games.items():
            result: dict[str, Any] = {}
            if "verdicts" in parts:
                result |= compare(game, folder, args.python, args.compared, args.node)
            if "episodes" in parts:
                result |= soak_of(game, count, args)
            results[name] = result
            print(json.dumps({name: result}), flush=True)
        if args.hub and "broken" in parts:
            results["broken"] = find_broken(broken)
    line = together(results)
    print(json.dumps(line))
    if args.out:
        merge(args.out, line)


def soak_of(game: Game, count: int, args: argparse.Namespace) -> dict[str, Any]:
    """Play the episodes of a game and return what was left behind."""
    folders_before = temporary()
    sessions_before = sessions(args.hub) if args.hub else set()
    soak = Soak(game, count, args.most_s)
    began = time.monotonic()
    soak.run(args.slots)
    seconds = time.monotonic() - began
    left = [f"process {p.name()}" for p in psutil.Process().children(recursive=True)]
    left += sorted(temporary() - folders_before)
    left += sorted((sessions(args.hub) if args.hub else set()) - sessions_before)
    return {
        "episodes": len(soak.episodes),
        "episodes_an_hour": round(3600 * len(soak.episodes) / seconds),
        "faults": soak.faults[:20],
        **leaks_of(soak, left),
    }


def together(results: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of all suites, those of each below them."""
    suites = [results[name] for name in ("cuagym", "mobilegym") if name in results]

    def total(key: str) -> int:
        return sum(suite.get(key, 0) for suite in suites)

    line: dict[str, Any] = {}
    if any("episodes" in suite for suite in suites):
        line |= {"episodes": total("episodes"), "leaks": total("leaks")}
    if any("verdicts_equal" in suite for suite in suites):
        line |= {key: total(key) for key in ("verdicts_equal", "verdicts_compared")}
        ratios = {
            key: {
                name: round(suite["steps_s"] / suite[other], 2)
                for name, suite in results.items()
                if other in suite
            }
            for key, other in (
                ("steps_s_ratio", "upstream_steps_s"),
                ("steps_s_ratio_unwaiting", "upstream_steps_s_unwaiting"),
            )
        }
        line |= ratios
    line |= results.get("broken", {})
    for name in ("cuagym", "mobilegym"):
        if name in results:
            line[name] = results[name]
    return line


def merge(place: Path, line: dict[str, Any]) -> None:
    """Write the figures to a file; other keys of it stay."""
    before = json.loads(place.read_text("utf-8")) if place.exists() else {}
    for name in ("cuagym", "mobilegym"):
        if name in before and name in line:
            line[name] = {**before[name], **line[name]}
    place.write_text(json.dumps({**before, **line}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
