"""Promises of suite browsergym in BrowserGym's own interpreter and a real browser."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from bus.errors import EnvError, MissingPartError, TaskError
from envs.contract.actions import Action, Answer, Click, Done, Fail, Goto, KeyPress, Type
from envs.contract.base import Observation
from envs.contract.registry import make_env
from envs.suites.browsergym.env import BrowsergymEnv
from envs.suites.browsergym.suite import BrowsergymSuite
from envs.suites.browsergym.tasks import find_interpreter, make_tasks, need_interpreter
from envs.tools.browser.process import find_chromium
from envs.tools.miniwob_pages import find_pages
from envs.tools.process_tree import descendants
from tests.waiting import lives, wait_until

try:
    need_interpreter(find_interpreter())
    find_chromium()
    find_pages()
except MissingPartError as missing:
    pytest.skip(str(missing), allow_module_level=True)

TASKS = make_tasks(["miniwob.enter-text", "own.page", "own.image", "own.none"])
BREAK, SPIN = Click(x=150, y=25), Click(x=50, y=25)  # on the page of own_tasks.py
COLOURS = {"/green": "green", "/blue": "blue"}


@pytest.fixture(scope="module")
def env() -> Iterator[BrowsergymEnv]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        patch.setenv("DART_BROWSERGYM_PACKAGES", "own_tasks")
        instance = BrowsergymSuite().make_env(pause_s=0.0)
        begin(instance, "own.page")  # the process starts here, with these variables
        yield instance
        instance.close()


def begin(env: BrowsergymEnv, name: str, seed: int = 0) -> tuple[Observation, str]:
    observation, info = env.reset(seed=seed, options={"task": TASKS[f"browsergym/{name}"]})
    return observation, info["instruction"]


def test_a_task_of_its_miniwob_is_ours_of_the_seed_that_it_hands_to_the_page(
    env: BrowsergymEnv,
) -> None:
    first, goal = begin(env, "miniwob.enter-text", seed=7)
    assert (first.width, first.height) == (498, 321)
    with_ours = int(np.random.RandomState(7).randint(0, 1_000_000))
    ours = make_env("miniwob")
    _, info = ours.reset(seed=with_ours, options={"task": "miniwob/enter-text"})
    ours.close()
    assert goal == info["instruction"]
    assert env.evaluate().outcome == "fail"
    over = enter(env, goal.split('"')[1])
    verdict = env.evaluate()
    assert (*over, verdict.outcome, verdict.reward) == (1.0, True, "pass", 1.0)
    with pytest.raises(EnvError, match="the episode is over"):
        env.step(Done())


def enter(env: BrowsergymEnv, text: str) -> tuple[float, bool]:
    """Fill in the field of enter-text and press the button below it."""
    for action in (Click(x=100, y=110), Type(text=text)):
        assert env.step(action)[1:3] == (0.0, False)
    return env.step(Click(x=60, y=150))[1:3]


def test_a_wrong_text_fails_with_browsergym_s_own_reward(env: BrowsergymEnv) -> None:
    first, _ = begin(env, "miniwob.enter-text", seed=7)
    again, _ = begin(env, "miniwob.enter-text", seed=7)
    assert first.screenshot == again.screenshot
    assert (*enter(env, "no text of it"), env.evaluate().outcome) == (0.0, True, "fail")


def test_an_answer_is_a_message_and_its_reward_a_score(env: BrowsergymEnv) -> None:
    _, goal = begin(env, "own.page")
    assert goal == "Answer."
    _, reward, terminated, _, _ = env.step(Answer(text='it\'s "42"\n'))
    verdict = env.evaluate()
    assert (reward, terminated, verdict.outcome, verdict.reward) == (0.5, True, "fail", 0.5)


def test_fail_reports_that_the_task_cannot_be_done(env: BrowsergymEnv) -> None:
    begin(env, "own.page")
    _, reward, terminated, _, _ = env.step(Fail())
    assert (reward, terminated, env.evaluate().outcome) == (1.0, True, "pass")


def test_an_image_of_a_goal_stands_below_the_first_screenshot(env: BrowsergymEnv) -> None:
    first, _ = begin(env, "own.image")
    assert (first.width, first.height) == (400, 450)
    image = Image.open(io.BytesIO(first.screenshot)).convert("RGB")
    below = {colour for _, colour in image.crop((0, 300, 400, 450)).getcolors() or ()}
    assert below == {(255, 255, 255), (0, 0, 255)}
    second, *_ = env.step(Click(x=200, y=440))  # below the page: it hits nothing
    assert (second.width, second.height) == (400, 300)


class Colours(BaseHTTPRequestHandler):
    """Pages of one colour each."""

    def do_GET(self) -> None:
        page = f"<body style='background: {COLOURS.get(self.path, 'gray')}'>".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name it has there
        pass


def test_addresses_history_and_tabs_are_those_of_a_browser(env: BrowsergymEnv) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Colours)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"

    def pixels_after(action: Action) -> tuple[int, ...]:
        observation, *_ = env.step(action)
        pixel = Image.open(io.BytesIO(observation.screenshot)).convert("RGB").getpixel((390, 290))
        assert isinstance(pixel, tuple)
        return pixel

    green, blue, white = (0, 128, 0), (0, 0, 255), (255, 255, 255)
    try:
        begin(env, "own.page")
        assert pixels_after(Goto(url=f"{url}/green")) == green
        assert pixels_after(Goto(url=f"{url}/blue".removeprefix("http://"))) == blue
        assert pixels_after(KeyPress(keys=["alt", "left"])) == green
        assert pixels_after(KeyPress(keys=["ctrl", "t"])) == white
        assert pixels_after(KeyPress(keys=["ctrl", "tab"])) == green
        assert pixels_after(KeyPress(keys=["ctrl", "2"])) == white
        assert pixels_after(KeyPress(keys=["ctrl", "w"])) == green
        assert pixels_after(Goto(url="file:///")) == green
        assert (
            pixels_after(Goto(url="http://127.0.0.1:1/")) != blue
        )  # an address that does not answer
    finally:
        server.shutdown()
        server.server_close()


def test_an_evaluator_that_breaks_and_a_task_that_is_none_are_errors(env: BrowsergymEnv) -> None:
    begin(env, "own.page")
    with pytest.raises(EnvError, match=r"own\.page: RuntimeError: the evaluator broke"):
        env.step(BREAK)
    with pytest.raises(TaskError, match=r"suite browsergym has no task 'browsergym/own\.none'"):
        begin(env, "own.none")


def test_a_browser_that_dies_breaks_its_episode_and_the_next_has_a_new_one(
    env: BrowsergymEnv,
) -> None:
    begin(env, "own.page")
    assert env.pid is not None
    for pid in descendants(env.pid):
        if lives(pid) and "chromium" in psutil.Process(pid).name():
            psutil.Process(pid).kill()
    with pytest.raises(EnvError, match="click in browsergym/own"):
        env.step(Click(x=300, y=200))
    with pytest.raises(EnvError, match="no episode is being played"):
        env.evaluate()


def test_a_page_that_hangs_is_killed_with_its_browser() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        patch.setenv("DART_BROWSERGYM_PACKAGES", "own_tasks")
        instance = BrowsergymSuite().make_env(
            pause_s=0.0, deadline_s=1.0, task_options={"hint": " Now."}
        )
        _, goal = begin(instance, "own.page")
        assert goal == "Answer. Now."
        assert instance.pid is not None
        folder = Path(psutil.Process(instance.pid).environ()["TMPDIR"])
        assert list(folder.glob("playwright*"))
        pids = [instance.pid, *descendants(instance.pid)]
        with pytest.raises(EnvError, match=r"click in browsergym/own\.page: no answer in 1 s"):
            instance.step(SPIN)
        assert instance.pid is None
        wait_until(lambda: not any(map(lives, pids)), "the end of its processes")
        assert not folder.exists()
        instance.close()
