"""Replays recorded episodes of MiniWoB++ and compares the verdicts of suite `miniwob` with BrowserGym's.

    python tests/envs/suites/miniwob/replays.py [--pages click-tab ...]       replay; exit code 1 where one differs
    python tests/envs/suites/miniwob/replays.py --record [--browsergym]       play and write the recording anew

The recording (replays.json beside this file) has episodes of the pages that both have, played
by oracles, by oracles that are careless, and by clicks at random. Each has its actions, the page's raw
reward, and the verdict of BrowserGym: what its `validate` returned after the last step. With
`--browsergym` that method itself judged the live page after every step (pip install
browsergym-miniwob); without it, its rule below. BrowserGym plays in real time and clicks by element, so
that it is asked for its verdict, and does not play.

Replayed, an episode must end as it was recorded. By the published metric it must pass where BrowserGym
gives reward 1; by our thresholds it may fail there on a page of PARTIAL, and never passes where BrowserGym
gives 0. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from bus.errors import EnvError
from envs.contract.actions import Action, Click, action_from_dict, action_to_dict
from envs.suites.miniwob.env import MiniwobEnv, MiniwobSuite
from envs.suites.miniwob.tasks import NO_ORACLE, PARTIAL, TASKS
from envs.tools.miniwob_pages import find_pages

RECORDING = Path(__file__).with_name("replays.json")

OURS_ALONE = frozenset({"button-delay", "moving-items", "simon-says"})
"""Tasks of the suite that BrowserGym leaves out."""

FRAGMENTS = frozenset({"search-engine"})
"""Pages with links that put a # behind the address: BrowserGym then ends the episode with 0, as if the
page had been left. For us it goes on."""

CARELESS = 0.25  # share of an oracle's actions that are a click at random instead


class PageState(NamedTuple):
    """What a page says after a step."""

    playing: bool  # False: a link or a form led to another document
    done: bool
    raw: float  # -1 to 1; 0 until it is done
    address: str = "same"  # or "fragment": a link has put a # behind it; or "other"


class Played(NamedTuple):
    """The end of an episode, and what was done."""

    actions: list[Action]
    state: PageState
    threshold: str  # outcome by our thresholds
    published: str  # outcome by the published metric


Judge = Callable[[MiniwobEnv, str], tuple[float, bool]]


def browsergym_rule(state: PageState) -> tuple[float, bool]:
    """Reward and whether it is over: AbstractMiniwobTask.validate of browsergym-miniwob 0.14.3."""
    return (float(state.raw > 0), state.done) if state.address == "same" else (0.0, True)


def play(
    env: MiniwobEnv, page: str, seed: int, choose: Callable[[int], Action | None], judge: Judge
) -> tuple[Played, tuple[float, bool]]:
    """Play what `choose` returns for each step until it is over, with the judge's verdict on the end."""
    task = TASKS[f"miniwob/{page}"]
    env.reset(seed=seed, options={"task": task})
    env.ask(
        "history.replaceState(null, '', location.pathname), 0"
    )  # without the # of an episode before
    actions: list[Action] = []
    verdict, over, ended = (0.0, False), False, False
    while not over and len(actions) < task.max_steps:
        action = choose(len(actions))
        if action is None:
            break
        actions.append(action)
        over = env.step(action)[2]
        if ended:  # for BrowserGym, at a fragment
            continue
        verdict = judge(env, page)
        ended = verdict[1]
        if ended != over and state_of(env).address != "fragment":
            raise SystemExit(f"{page} seed {seed}: over for us {over}, for BrowserGym {ended}")
    outcomes = []
    for env.metric in ("published", "threshold"):
        outcomes.append(env.evaluate().outcome)
    return Played(actions, state_of(env), outcomes[1], outcomes[0]), verdict


def state_of(env: MiniwobEnv) -> PageState:
    """Return what the page says now."""
    told = env.page_state
    address = "other"
    if told["playing"]:
        address = "fragment" if "#" in env.ask("location.href") else "same"
    return PageState(told["playing"], told["done"], told["reward"], address)


# --- recording ------------------------------------------------------------------------------------


def by_rule(env: MiniwobEnv, _page: str) -> tuple[float, bool]:
    """BrowserGym's rule, as it is written here."""
    return browsergym_rule(state_of(env))


def by_browsergym() -> Judge:
    """BrowserGym's own `validate`, asked about the live page."""
    from browsergym.miniwob import ALL_MINIWOB_TASKS  # type: ignore[import-not-found]

    base = f"{find_pages().as_uri()}/"
    tasks = {task.subdomain: task(seed=0, base_url=base) for task in ALL_MINIWOB_TASKS}

    def judge(env: MiniwobEnv, page: str) -> tuple[float, bool]:
        task = tasks[page]
        task.page = LivePage(env)
        reward, done, _, _ = task.validate(task.page, [])
        assert (reward, done) == browsergym_rule(state_of(env)), (page, reward, done)
        return float(reward), bool(done)

    return judge


class LivePage:
    """What BrowserGym asks of Playwright's page, answered by ours."""

    def __init__(self, env: MiniwobEnv) -> None:
        self._env = env

    @property
    def url(self) -> str:
        """The address of the document that is shown."""
        return str(self._env.ask("location.href"))

    def evaluate(self, function: str) -> Any:
        """Return the result of a function without arguments."""
        return self._env.ask(f"({function.strip()})()")


def players(
    env: MiniwobEnv, page: str, seed: int
) -> Iterator[tuple[str, int, Callable[[int], Action]]]:
    """Who plays a page: its name, the seed, what it does."""
    rng = Random(f"{page}/{seed}")

    def anywhere(_: int) -> Action:
        widgets = env.widgets()
        if widgets and rng.random() < 0.7:
            left, top, right, bottom = rng.choice(widgets).box
            return Click(x=round((left + right) / 2), y=round((top + bottom) / 2))
        return Click(x=rng.randrange(160), y=rng.randrange(50, 210))

    def careless(step: int) -> Action:
        if rng.random() >= CARELESS:
            with suppress(EnvError):  # where it was careless before, it may find no way any more
                return env.oracle_action()
        return anywhere(step)

    yield "random", seed, anywhere
    if page in NO_ORACLE:
        yield "random", seed + 1, anywhere
        yield "random", seed + 2, anywhere
    else:
        yield "oracle", seed + 1, lambda _: env.oracle_action()
        yield "careless", seed + 2, careless
        yield "careless", seed + 3, careless


def record(pages: Sequence[str], judge: Judge, judged_by: str) -> dict[str, Any]:
    """Play all pages; the recording."""
    env, episodes = MiniwobSuite().make_env(browsers=1), []
    try:
        for page in pages:
            for player, seed, choose in players(env, page, 100):
                played, verdict = play(env, page, seed, choose, judge)
                episodes.append(
                    {
                        "page": page,
                        "seed": seed,
                        "player": player,
                        "actions": [compact(action) for action in played.actions],
                        "address": played.state.address,
                        "done": played.state.done,
                        "raw": played.state.raw,
                        "outcome": played.threshold,
                        "browsergym": list(verdict),
                    }
                )
    finally:
        env.close()
    return {"pages": "miniwob 1.1.0", "judged_by": judged_by, "episodes": episodes}


def compact(action: Action) -> dict[str, Any]:
    """Return the action without what is the default."""
    plain = action_to_dict(action)
    return {key: value for key, value in plain.items() if (key, value) != ("button", "left")}


# --- replaying ------------------------------------------------------------------------------------


def replay(env: MiniwobEnv, episode: dict[str, Any]) -> list[str]:
    """Play a recorded episode; what differs from the recording or from BrowserGym's verdict."""
    actions = [action_from_dict(each) for each in episode["actions"]]
    played, _ = play(
        env,
        episode["page"],
        episode["seed"],
        lambda step: actions[step] if step < len(actions) else None,
        by_rule,
    )
    state = PageState(
        episode["address"] != "other", episode["done"], episode["raw"], episode["address"]
    )
    found = [] if played.state == state else [f"it ended with {played.state}, recorded {state}"]
    if len(played.actions) < len(actions):
        found.append(f"it was over after {len(played.actions)} of {len(actions)} steps")
    return found + disagreements(episode, played.threshold, played.published)


def disagreements(episode: dict[str, Any], threshold: str, published: str) -> list[str]:
    """Where our outcomes, by threshold and by the published metric, contradict BrowserGym's verdict."""
    reward, over = episode["browsergym"]
    rewarded = bool(over and reward > 0)
    if episode["address"] == "fragment" and episode["page"] in FRAGMENTS:
        rewarded = episode["done"] and episode["raw"] > 0  # what it would give at the same address
    found = []
    if (published == "pass") != rewarded:
        found.append(f"BrowserGym gives {reward:g}, by the published metric we say {published}")
    if threshold == "pass" and not rewarded:
        found.append(f"BrowserGym gives {reward:g}, we say pass")
    if threshold == "fail" and rewarded and episode["page"] not in PARTIAL:
        found.append("BrowserGym gives 1, we say fail, and the page is not in PARTIAL")
    return found


def replay_all(episodes: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Replay episodes and print what differs; the result."""
    env, counts, differing = MiniwobSuite().make_env(browsers=1), Counter[str](), 0
    try:
        for episode in episodes:
            found = replay(env, episode)
            for line in found:
                sys.stdout.write(
                    f"{episode['page']} seed {episode['seed']} ({episode['player']}): {line}\n"
                )
            differing += bool(found)
            passed = episode["outcome"] == "pass"
            counts["episodes"] += 1
            counts["browsergym_passes"] += episode["browsergym"][0] > 0
            counts["passes"] += passed
            counts["passes_by_published_metric_alone"] += (
                episode["browsergym"][0] > 0 and not passed
            )
    finally:
        env.close()
    return {"benchmark": "miniwob_replays", **counts, "differing": differing}


def main() -> int:
    """Record, or replay; ends in one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--browsergym", action="store_true", help="its own validate judges")
    parser.add_argument("--pages", nargs="+")
    arguments = parser.parse_args()
    both = sorted(task.params["page"] for task in TASKS.values())
    pages = arguments.pages or [page for page in both if page not in OURS_ALONE]
    if arguments.record:
        judge = by_browsergym() if arguments.browsergym else by_rule
        judged_by = "browsergym-miniwob 0.14.3" if arguments.browsergym else "its rule"
        recording = record(pages, judge, judged_by)
        lines = ",\n".join(
            json.dumps(each, separators=(",", ":")) for each in recording["episodes"]
        )
        head = json.dumps({**recording, "episodes": []})[:-2]
        RECORDING.write_text(f"{head}\n{lines}\n]}}\n", encoding="utf-8")
        sys.stdout.write(f"{RECORDING.name}: {len(recording['episodes'])} episodes\n")
    episodes = json.loads(RECORDING.read_text(encoding="utf-8"))["episodes"]
    result = replay_all(each for each in episodes if each["page"] in pages)
    sys.stdout.write(json.dumps(result) + "\n")
    return 1 if result["differing"] else 0


if __name__ == "__main__":
    sys.exit(main())
