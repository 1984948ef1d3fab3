"""The environment over Playwright of docs/your-application.md plays the page of docs/examples/web."""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.errors import MissingPartError
from dart_cli.config.schema import EnvConfig
from dart_cli.env.async_env import AsyncEnv, make_async_env
from envs.contract.actions import Click
from envs.contract.registry import load_suite
from envs.tools.browser.process import find_chromium
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
LONGEST = 28  # lines that are not blank


def shown() -> str:
    """Return the environment as the page shows it."""
    page = (ROOT / "docs" / "your-application.md").read_text(encoding="utf-8")
    section = page.partition("### A web page, with Playwright\n")[2].partition("\n## ")[0]
    [code] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return code


def test_the_environment_over_playwright_is_short() -> None:
    assert sum(bool(line.strip()) for line in shown().splitlines()) <= LONGEST


@pytest.fixture(scope="module")
def chromium() -> Path:
    """Return the browser's binary, where Playwright can drive it."""
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("no Playwright: pip install playwright")
    try:
        return find_chromium()
    except MissingPartError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory, chromium: Path) -> Iterator[str]:
    """Return the shown environment as a suite, and serve the page that it plays."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = ROOT / "docs" / "examples" / "web" / "server.py"
    with subprocess.Popen([sys.executable, str(server), str(port)]) as serving:
        try:
            address = f"http://127.0.0.1:{port}"
            wait_until(lambda: is_served(f"{address}/state"), "the page is served")
            code = shown().replace("http://127.0.0.1:5173", address)
            folder = tmp_path_factory.mktemp("shown")
            note = NOTE.format(path=str(folder / "threads"))
            (folder / "page_env.py").write_text(f"{code}\n{note}", encoding="utf-8")
            yield f"{folder / 'page_env.py'}:PageSuite"
        finally:
            serving.kill()


NOTE = """
import os
import threading


def noting(name, method):
    def call(self, *arguments, **options):
        with open({path!r}, "a") as file:
            file.write(f"{{os.getpid()}}-{{id(self)}} {{threading.get_ident()}}\\n")
        return method(self, *arguments, **options)

    return call


for name in ("reset", "step", "evaluate", "close"):
    setattr(PageEnv, name, noting(name, getattr(PageEnv, name)))
"""
"""Notes which thread makes each call, in a file, since the environment may be in another process."""


def is_served(address: str) -> bool:
    try:
        with urllib.request.urlopen(address) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


async def invite(env: AsyncEnv, suite: str, seed: int) -> str:
    """Click on every row of the list, and on both places of an answer; return the outcome."""
    task = load_suite(suite).tasks["page/invite"]
    first, _ = await env.reset(task, seed)
    assert (first.width, first.height) == (336, 252)
    assert (await env.evaluate()).outcome == "fail"
    for row in range(3):
        for x in (115, 221):  # either answer closes the dialog, and one of them sends an invitation
            stepped = await env.step(Click(x=160, y=60 + 41 * row))
            assert stepped.observation.screenshot != first.screenshot, "a dialog is open"
            stepped = await env.step(Click(x=x, y=143))
            if stepped.terminated:
                return (await env.evaluate()).outcome
    return "fail"


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_it_plays_in_any_slot_and_one_thread_makes_all_calls(
    suite: str, isolation: str
) -> None:
    config = EnvConfig.model_validate({"suite": suite, "isolation": isolation})
    noted = Path(suite.partition(":")[0]).with_name("threads")
    noted.unlink(missing_ok=True)
    slots = [make_async_env(config, f"env-0/{slot}") for slot in range(2)]
    try:
        for seed in (1, 2):
            for env in slots:
                assert await invite(env, suite, seed) == "pass"
    finally:
        for env in slots:
            await env.close()
    calls = {tuple(line.split()) for line in noted.read_text().splitlines()}
    assert len(calls) == 2, "each environment has one thread"
    assert len({of_env for of_env, _ in calls}) == 2
