"""The program that has MobileGym's tasks and judges, in an interpreter with the packages of its bench_env.

It runs as `python -c SOURCE` in MobileGym's folder and is never imported; envs/tools/child_program.py defines the
protocol. Its requests and their answers:

    {"do": "list"}   ->  {"tasks": [...], "phone": ...}: all tasks, with the split and the steps that MobileGym gives
                         them, and the phone's screen
    {"do": "reset", "task": ..., "seed": ..., "url": ..., "size": ..., "scale": ...}  ->  {"instruction": ...}
    {"do": "judge", "answer": ...}  ->  MobileGym's judgement of the present state
    any error        ->  {"error": "one line"}

MobileGym's own code sets tasks up and judges them through a page of Playwright. Here that page is a `Page`, which
hands each call to the process that has the browser: during a reset and a judgement the answer may be

    {"page": "evaluate", "expression": ...}, {"page": "goto", "address": ...} or {"page": "pass", "seconds": ...}

to which the next request replies with {"value": ...} or {"fault": ...}. A pause of its code lets the page's time
pass.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ORPHAN_POLL_S = 1.0
POLL_S = 0.05  # of the page's time, between two looks at a condition
MOST_ISSUES = 20  # of a judgement that are returned, of each kind


def main() -> None:
    """Answer requests until stdin ends."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what tasks print goes to the log
    logging.disable(logging.WARNING)
    sys.path.insert(0, str(Path.cwd()))
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    wire = Wire(requests, answers)
    phone = Phone(wire)
    for line in requests:
        wire.send(asyncio.run(answer(phone, json.loads(line))))


async def answer(phone: Phone, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request."""
    try:
        match request["do"]:
            case "list":
                return {"tasks": list(listed()), "phone": screen()}
            case "reset":
                return await phone.reset(request)
            case "judge":
                return await phone.judge(request)
            case other:
                return {"error": f"no such request: {other}"}
    except Exception as error:  # noqa: BLE001 - the caller gets every error as an answer
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}


def end_with(parent: int) -> None:
    """End this process once its parent is gone."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_POLL_S)
    os._exit(1)


def module(name: str) -> Any:
    """Return a module of MobileGym's bench_env."""
    return importlib.import_module(f"bench_env.{name}")


def screen() -> dict[str, Any]:
    """Return the phone's screen as MobileGym's benchmark has it."""
    settings = module("config").RunnerConfig(agent="dart", model_name="")
    (width, height), scale = settings.viewport_size, settings.device_scale_factor
    context = module("env.mobile_gym").MobileGymEnv.get_context_args(width, height, scale)
    return {"size": [width, height], "scale": scale, "user_agent": context["user_agent"]}


def listed() -> Iterable[dict[str, Any]]:
    """Yield what is known of each task before it is set up."""
    limits = module("config").RunnerConfig(agent="dart", model_name="")
    splits = {
        name: {line.split("#")[0].strip() for line in path.read_text("utf-8").splitlines()}
        for name in ("train", "test")
        if (path := Path("bench_env", "splits", f"{name}.txt")).is_file()
    }
    for task in module("task.registry").load_tasks(seed=0):
        yield {
            "id": task.id,
            "apps": list(task.apps),
            "difficulty": task.difficulty,
            "max_steps": limits.get_max_steps(task),
            "answer_sheet": bool(getattr(task, "answer_fields", None)),
            "split": next((name for name, ids in splits.items() if task.id in ids), ""),
        }


class Wire:
    """The pipes to the process that has the browser."""

    def __init__(self, requests: Any, answers: Any) -> None:
        self._requests = requests
        self._answers = answers

    def send(self, message: dict[str, Any]) -> None:
        """Send an answer."""
        self._answers.write(json.dumps(message).encode() + b"\n")
        self._answers.flush()

    def ask(self, **call: Any) -> Any:
        """Have the page do something, and return its value. Raises RuntimeError if it could not."""
        self.send(call)
        line = self._requests.readline()
        if not line:
            os._exit(1)  # the process that has the browser is gone
        reply = json.loads(line)
        if "fault" in reply:
            raise RuntimeError(reply["fault"])
        return reply.get("value")


class Page:
    """The part of a page of Playwright that MobileGym's environment and tasks use."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def evaluate(self, source: str, arg: Any = None) -> Any:
        """Return the value of an expression, or of a function called with `arg`."""
        expression = (
            f"(async () => {{ const value = ({source}\n); "
            f"return typeof value === 'function' ? await value({json.dumps(arg)}) : await value; }})()"
        )
        return self._wire.ask(page="evaluate", expression=expression)

    async def wait_for_function(self, source: str, *, arg: Any = None, **limits: float) -> None:
        """Let the page's time pass until a condition holds, at most `limits["timeout"]` ms."""
        most_s, passed = limits.get("timeout", 30_000.0) / 1000, 0.0
        while not await self.evaluate(source, arg):
            if passed > most_s:
                raise TimeoutError(f"{source} did not hold in {most_s:g} s")
            self.let_pass(POLL_S)
            passed += POLL_S

    async def goto(self, address: str, **_: Any) -> None:
        """Open an address and wait until it has loaded."""
        self._wire.ask(page="goto", address=address)

    async def wait_for_load_state(self, *_: Any, **__: Any) -> None:
        """Return at once: a page has loaded when `goto` returns."""

    async def wait_for_timeout(self, ms: float) -> None:
        """Let the page's time pass."""
        self.let_pass(ms / 1000)

    async def screenshot(self, **_: Any) -> bytes:
        """Return no picture: judges look at the state."""
        return b""

    def on(self, *_: Any) -> None:
        """Report no event: the process that has the browser notes them."""

    def let_pass(self, seconds: float) -> None:
        """Let the page's time pass."""
        if seconds > 0:
            self._wire.ask(page="pass", seconds=seconds)


class Phone:
    """One task at a time, set up and judged by MobileGym's own code."""

    def __init__(self, wire: Wire) -> None:
        self._page = Page(wire)
        self._task: Any = None
        self._env: Any = None
        self._first: Any = None  # the first observation, with the state at that time

    async def reset(self, request: dict[str, Any]) -> dict[str, Any]:
        """Set a task up on the page, which has the phone open in a new profile, and return its instruction."""

        async def let_pass(seconds: float, result: Any = None) -> Any:
            self._page.let_pass(seconds)
            return result

        self._task = None
        asyncio.sleep = let_pass  # type: ignore[assignment]
        suite, _, _ = request["task"].partition(".")
        tasks = module("task.registry").load_tasks(suite, seed=request["seed"])
        task = next((task for task in tasks if task.id == request["task"]), None)
        if task is None:
            raise LookupError(f"MobileGym has no task {request['task']}")
        width, height = request["size"]
        env = module("env.mobile_gym").MobileGymEnv(
            url=request["url"],
            viewport_size=(width, height),
            physical_size=(round(width * request["scale"]), round(height * request["scale"])),
            device_scale_factor=request["scale"],
            coord_space="physical",
            verbose=False,
        )
        # Its page is this one, and its first reset only waits until the phone is ready.
        vars(env).update(_page=self._page, _fresh=True)
        first, _ = await module("runner.base").Controller.setup(env, task)
        self._env, self._task, self._first = env, task, first
        return {"instruction": task.description}

    async def judge(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return MobileGym's judgement of the present state."""
        if self._task is None:
            raise LookupError("no task is set up")
        env, task = self._env, self._task
        last = await env.get_observation()
        last.state.update(await env.get_state(required_apps=list(task.apps) or None))
        evaluator = module("runner.base").Evaluator(judge_mode="state")
        result = await evaluator.evaluate(
            task, self._first, last, SimpleNamespace(agent_answer=request["answer"])
        )
        judgement = result.to_dict()
        return {
            "passed": bool(judgement["passed"]),
            "success": bool(judgement["success"]),
            "clean": bool(judgement["clean"]),
            "progress": float(judgement["progress"]),
            "issues": [_line(issue) for issue in judgement["issues"] if not issue.get("passed")][
                :MOST_ISSUES
            ],
            "warnings": [_line(change) for change in judgement["warnings"]][:MOST_ISSUES],
            "judge_error": judgement.get("judge_error") or "",
        }


def _line(entry: dict[str, Any]) -> str:
    """Return an entry of a judgement in one line."""
    field = entry.get("field", "")
    if "before" in entry or "after" in entry:
        text = f"{field}: {entry.get('before')!r} -> {entry.get('after')!r}"
    elif "expected" in entry:
        text = f"{field}: {entry.get('actual')!r}, wanted {entry.get('expected')!r}"
    else:
        text = f"{field} {entry.get('reason', '')}".strip()
    return " ".join(text.split())[:300]


if __name__ == "__main__":
    main()
