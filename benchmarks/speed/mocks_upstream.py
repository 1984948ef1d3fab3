"""Plays episodes as the upstream projects do it, with Playwright: the baseline of mocks.py.

It runs in another interpreter, which has Playwright and the packages of MobileGym's bench_env, and imports nothing
of dart: `python mocks_upstream.py JOB.json ANSWER.json`. The job has the episodes with their actions; the answer has
for each its reward, whether it passed, its steps and their seconds.

    cuagym      the steps of CUA-Gym's README: initial_setup.py, the page, reward.py, one after another, since
                the programs of all tasks share one file in /tmp
    mobilegym   bench_env's own environment, controller and evaluator, with an agent that plays the actions
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

ARGUMENTS = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"]
NOTCH = 50  # CSS pixels that a notch of the wheel scrolls in dart
KEYS = {
    "ctrl": "Control",
    "enter": "Enter",
    "escape": "Escape",
    "tab": "Tab",
    "backspace": "Backspace",
}
PROGRAM_S, START_S = 120, 60
FIRST_PORT = 19000


def main() -> None:
    """Play the job's episodes and write the answer."""
    job = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    play = {"cuagym": play_cuagym, "mobilegym": play_mobilegym}[job["suite"]]
    answer = asyncio.run(play(job))
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")


def serve(command: Sequence[str], place: Path, port: int) -> subprocess.Popen[bytes]:
    """Start a server and wait until it answers."""
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), "--strictPort"],
        cwd=place,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    until = time.monotonic() + START_S
    while True:
        try:
            with urlopen(f"http://127.0.0.1:{port}/", timeout=5):
                return server
        except OSError:
            if time.monotonic() > until or server.poll() is not None:
                raise
            time.sleep(0.1)


# --- CUA-Gym ------------------------------------------------------------------------------------


async def play_cuagym(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Play bundles in mocks that `vite preview` serves, as their `npm run preview` does."""
    playwright: Any = importlib.import_module("playwright.async_api")
    folder = Path(job["folder"])
    mocks = sorted({episode["mock"] for episode in job["episodes"]})
    addresses = {mock: f"127.0.0.1:{FIRST_PORT + n}" for n, mock in enumerate(mocks)}
    servers = []
    try:
        for number, mock in enumerate(mocks):
            place = (folder / "websites" / mock).resolve()
            vite = place / "node_modules" / "vite" / "bin" / "vite.js"
            servers.append(serve([job["node"], str(vite), "preview"], place, FIRST_PORT + number))
        async with playwright.async_playwright() as driver:
            browser = await driver.chromium.launch(
                executable_path=job["chromium"],
                args=ARGUMENTS,
                ignore_default_args=["--hide-scrollbars"],
            )
            return [
                await play_bundle(browser, folder, episode, addresses, job["idle"])
                for episode in job["episodes"]
            ]
    finally:
        for server in servers:
            server.kill()
            server.wait()


async def play_bundle(
    browser: Any,
    folder: Path,
    episode: Mapping[str, Any],
    addresses: Mapping[str, str],
    idle: bool,
) -> dict[str, Any]:
    """Play one bundle; with `idle` each step waits for the network as Playwright's users do."""
    bundle = folder / "cua_gym_tasks" / episode["task"]
    with tempfile.TemporaryDirectory() as scratch:
        run_program(bundle / "initial_setup.py", addresses, Path(scratch))
        sid = session()
        context = await browser.new_context(
            viewport={"width": 1280, "height": 720},
            locale="en-US",
            timezone_id="UTC",
            reduced_motion="reduce",
        )
        page = await context.new_page()
        await page.goto(f"http://{addresses[episode['mock']]}/?sid={sid}")
        # A busy machine may be without requests before the application has begun.
        await page.wait_for_function("document.body.innerText.length > 100")
        await page.wait_for_load_state("networkidle")
        await asyncio.sleep(1.0)
        began = time.perf_counter()
        for action in episode["actions"]:
            await act(page, action)
            if idle:
                await page.wait_for_load_state("networkidle")
                await asyncio.sleep(0.5)
            await page.screenshot()
        seconds = time.perf_counter() - began
        await asyncio.sleep(0.5)
        await context.close()
        out = run_program(bundle / "reward.py", addresses, Path(scratch))
    reward = float(re.findall(r"REWARD:\s*(\S+)", out)[-1])
    return {
        "reward": reward,
        "passed": reward >= 1,
        "steps": len(episode["actions"]),
        "seconds": seconds,
    }


def session() -> str:
    """Return the session that a setup program wrote down, at the place that CUA-Gym's programs share."""
    return Path("/tmp/task_web_sid").read_text("utf-8").strip()


def run_program(path: Path, addresses: Mapping[str, str], scratch: Path) -> str:
    """Fill the addresses in, run the program with a browser that does nothing, and return what it printed."""
    text = path.read_text("utf-8")
    for mock, address in addresses.items():
        word = mock.removesuffix("_mock").upper()
        text = text.replace(f"__CUA_GYM_{word}_URL__", f"http://{address}")
    program = scratch / path.name
    program.write_text(text, encoding="utf-8")
    chrome = scratch / "google-chrome"
    chrome.write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
    chrome.chmod(0o755)
    program_run = subprocess.run(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=PROGRAM_S,
        env={**os.environ, "PATH": f"{scratch}:{os.environ['PATH']}"},
    )
    return program_run.stdout


async def act(page: Any, action: Mapping[str, Any]) -> None:
    """Perform an action of dart with Playwright's mouse and keyboard."""
    match action["kind"]:
        case "click":
            await page.mouse.click(action["x"], action["y"], button=action.get("button", "left"))
        case "double_click":
            await page.mouse.dblclick(action["x"], action["y"])
        case "type":
            await page.keyboard.type(action["text"])
        case "keypress":
            await page.keyboard.press("+".join(KEYS.get(key, key) for key in action["keys"]))
        case "scroll":
            await page.mouse.move(action["x"], action["y"])
            await page.mouse.wheel(NOTCH * action.get("dx", 0), NOTCH * action.get("dy", 0))
        case "drag":
            (x, y), *rest = action["path"]
            await page.mouse.move(x, y)
            await page.mouse.down()
            for place in rest:
                await page.mouse.move(*place, steps=10)
                await asyncio.sleep(0.1)
            await page.mouse.up()


# --- MobileGym ----------------------------------------------------------------------------------


class PlayingAgent:
    """An agent of bench_env that plays given actions, and then completes."""

    name, config = "list", None

    def __init__(self, actions: Sequence[Any]) -> None:
        self._actions = list(actions)
        self.history: list[Any] = []

    def reset(self, _: str) -> None:
        """Begin an episode."""

    def act(self, _: Any) -> Any:
        """Return the next action."""
        return self._actions.pop(0)


def of_dart(action: Mapping[str, Any], base: Any) -> Any:
    """Return an action of bench_env."""
    kind = base.ActionType
    match action["kind"]:
        case "click" if action.get("button") == "right":
            return base.Action(kind.LONG_PRESS, {"point": [action["x"], action["y"]]})
        case "click":
            return base.Action(kind.CLICK, {"point": [action["x"], action["y"]]})
        case "double_click":
            return base.Action(kind.DOUBLE_TAP, {"point": [action["x"], action["y"]]})
        case "drag":
            first, last = action["path"][0], action["path"][-1]
            return base.Action(kind.SWIPE, {"point1": first, "point2": last, "duration": 400})
        case "type":
            return base.Action(kind.TYPE, {"value": action["text"]})
        case "keypress":
            name = {"back": "BACK", "home": "HOME", "enter": "ENTER", "recents": "RECENT"}
            return base.Action(kind[name[action["keys"][0]]], {})
        case other:
            raise ValueError(other)


async def play_mobilegym(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Play tasks with bench_env's environment, controller and evaluator."""
    folder = Path(job["folder"])
    sys.path.insert(0, str(folder))
    base = importlib.import_module("bench_env.env.base")
    env_class: Any = importlib.import_module("bench_env.env.mobile_gym").MobileGymEnv
    runner: Any = importlib.import_module("bench_env.runner.base")
    registry: Any = importlib.import_module("bench_env.task.registry")
    playwright: Any = importlib.import_module("playwright.async_api")
    vite = folder / "node_modules" / "vite" / "bin" / "vite.js"
    server = serve([job["node"], str(vite), "preview"], folder, FIRST_PORT)
    scale = job["scale"]
    answers = []
    try:
        async with playwright.async_playwright() as driver:
            browser = await driver.chromium.launch(
                executable_path=job["chromium"], args=[*ARGUMENTS, "--enable-unsafe-swiftshader"]
            )
            env = env_class(
                url=f"http://127.0.0.1:{FIRST_PORT}",
                browser=browser,
                viewport_size=(360, 800),
                physical_size=(round(360 * scale), round(800 * scale)),
                device_scale_factor=scale,
                coord_space="physical",
                delay_after_action=0.8 if job["idle"] else 0.0,
                verbose=False,
            )
            await env.start()
            for episode in job["episodes"]:
                suite = episode["task"].partition(".")[0]
                tasks = registry.load_tasks(suite, seed=episode["seed"])
                task = next(task for task in tasks if task.id == episode["task"])
                first, _ = await runner.Controller.setup(env, task)
                actions = [of_dart(action, base) for action in episode["actions"]]
                agent = PlayingAgent(
                    [*actions, base.Action(base.ActionType.COMPLETE, {"return": ""})]
                )
                began = time.perf_counter()
                execution, first, last, _, _ = await runner.Controller.run(
                    env, agent, task, first, max_steps=len(actions) + 1
                )
                seconds = time.perf_counter() - began
                if execution.error:
                    raise RuntimeError(f"{episode['task']}: {execution.error}")
                judge = await runner.Evaluator(judge_mode="state").evaluate(
                    task, first, last, execution
                )
                answers.append(
                    {
                        "passed": judge.passed,
                        "success": judge.success,
                        "clean": judge.clean,
                        "progress": judge.progress,
                        "steps": len(actions),
                        "seconds": seconds,
                    }
                )
            await browser.close()
    finally:
        server.kill()
        server.wait()
    return answers


if __name__ == "__main__":
    main()
