"""Promises of suite `miniwob`: exact repeats, correct verdicts, and a browser that may die at any time.

The real browser plays; where it or the package is not installed, these tests are skipped.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from PIL import Image

from bus.errors import EnvError, MissingPartError, TaskError
from envs.contract.actions import (
    Action,
    Click,
    Done,
    DoubleClick,
    Drag,
    KeyPress,
    Move,
    Scroll,
    Type,
    Wait,
)
from envs.contract.base import GuiEnv, Observation, Solvable
from envs.contract.registry import check_parts, make_env
from envs.suites.miniwob.browser import SPARE_PAGES
from envs.suites.miniwob.env import MiniwobEnv, MiniwobSuite
from envs.suites.miniwob.tasks import TASKS
from envs.tools.browser.process import (
    PROFILE_PREFIX,
    BrowserProcess,
    find_chromium,
    remove_stale_profiles,
)
from envs.tools.miniwob_pages import find_pages
from tests.waiting import until, wait_until

try:
    find_chromium()
    find_pages()
except MissingPartError as missing:
    pytest.skip(str(missing), allow_module_level=True)

STEADY = ("click-test", "click-tab-2", "enter-text", "use-slider", "social-media", "email-inbox")


@pytest.fixture(scope="module")
def env() -> Iterator[MiniwobEnv]:
    instance = MiniwobSuite().make_env()
    yield instance
    instance.close()


def begin(env: MiniwobEnv, page: str, seed: int = 7) -> Observation:
    return env.reset(seed=seed, options={"task": f"miniwob/{page}"})[0]


def solve(env: MiniwobEnv, page: str, seed: int) -> str:
    """Play the oracle to the end; the verdict's outcome."""
    begin(env, page, seed)
    for _ in range(TASKS[f"miniwob/{page}"].max_steps):
        if env.step(env.oracle_action())[2]:
            break
    return env.evaluate().outcome


def value(env: MiniwobEnv, expression: str) -> object:
    assert env._page is not None
    return env._page.evaluate(expression)


def processes_of(browser: int) -> list[int]:
    """Process ids of the browser's group that are alive."""
    alive = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == browser and fields[0] != "Z":
                alive.append(int(folder.name))
    return alive


def browser_of(env: MiniwobEnv) -> int:
    assert env._page is not None
    return env._page.browser.pid


def command_of(pid: int) -> list[str]:
    """Empty for a moment after the process was started: the kernel sets it late."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def profiles() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob(f"{PROFILE_PREFIX}*"))


def gone(what: str, seconds: float = 20.0) -> None:
    pytest.fail(f"{what} was still there after {seconds:g} s")


# --- the contract -----------------------------------------------------------------------------


def test_the_environment_keeps_the_contract(env: MiniwobEnv) -> None:
    assert isinstance(env, GuiEnv)
    assert isinstance(env, Solvable)
    screen = begin(env, "click-test")
    image = Image.open(io.BytesIO(screen.screenshot))
    assert (image.width, image.height) == (screen.width, screen.height) == (160, 210)


def test_a_page_begins_with_an_instruction_and_is_not_solved(env: MiniwobEnv) -> None:
    for task in list(TASKS.values())[::5]:
        _, info = env.reset(seed=3, options={"task": task})
        assert info["instruction"], task.id
        assert env.evaluate().outcome == "fail", task.id


def test_a_screenshot_grows_with_scale_and_points_with_it() -> None:
    env = make_env("miniwob", scale=2.0, encoding="jpeg")
    assert isinstance(env, MiniwobEnv)
    try:
        screen = begin(env, "click-test-2")
        assert (screen.width, screen.height) == (320, 420)
        assert Image.open(io.BytesIO(screen.screenshot)).size == (320, 420)
        assert solve(env, "click-test-2", 5) == "pass"
    finally:
        env.close()


# --- repeats ------------------------------------------------------------------------------------


def random_action(rng: Random) -> Action:
    def point() -> tuple[int, int]:
        return rng.randrange(160), rng.randrange(50, 210)

    x, y = point()
    return rng.choice(
        [
            Click(x=x, y=y),
            DoubleClick(x=x, y=y),
            Click(x=x, y=y, button="right"),
            Drag(path=[(x, y), point()]),
            Type(text="a b"),
            Scroll(x=x, y=y, dy=2),
            Move(x=x, y=y),
            Wait(seconds=2),
        ]
    )


@pytest.mark.parametrize("page", STEADY)
def test_a_seed_repeats_pixel_by_pixel_after_any_other_episodes(env: MiniwobEnv, page: str) -> None:
    def play(seed: int, stream: str) -> list[bytes]:
        rng = Random(stream)
        screens = [begin(env, page, seed).screenshot]
        for _ in range(5):
            observation, _, over, _, _ = env.step(random_action(rng))
            screens.append(observation.screenshot)
            if over:
                break
        return screens

    first = play(11, "same")
    play(12, "other")
    assert play(11, "same") == first
    assert play(13, "same")[0] != first[0]


def test_a_task_that_comes_back_finds_its_page_loaded_and_few_pages_are_kept() -> None:
    env = MiniwobSuite().make_env()
    try:
        begin(env, "click-test")
        value(env, "window.mark = 5")
        begin(env, "enter-text")
        begin(env, "click-test")
        assert value(env, "window.mark") == 5
        for page in ("click-color", "click-shape", "use-slider", "click-button", "click-tab"):
            begin(env, page)
        assert env._page is not None
        targets = env._page.browser.call("Target.getTargets")["targetInfos"]
        assert sum(target["type"] == "page" for target in targets) <= 1 + SPARE_PAGES
    finally:
        env.close()


def test_a_page_that_crashed_while_unused_costs_no_episode() -> None:
    env = MiniwobSuite().make_env()
    try:
        begin(env, "click-test")
        page_before = env._page
        begin(env, "enter-text")
        assert page_before is not None
        with pytest.raises(EnvError):
            page_before._session.call("Page.crash")
        first = begin(env, "click-test")
        assert env._page is not page_before
        assert first.screenshot == begin(env, "click-test").screenshot
    finally:
        env.close()


def test_the_time_a_policy_takes_changes_nothing(env: MiniwobEnv) -> None:
    """A page's clock advances by steps only: nothing moves in between."""
    screen = begin(env, "moving-items")
    assert env._page is not None
    time.sleep(0.3)
    assert env._page.look() == screen.screenshot
    assert env.step(Wait(seconds=1))[0].screenshot != screen.screenshot


def test_no_episode_times_out_by_itself(env: MiniwobEnv) -> None:
    begin(env, "click-test")
    for _ in range(3):
        assert env.step(Wait(seconds=60))[1:3] == (0.0, False)


# --- actions --------------------------------------------------------------------------------------


def test_every_kind_of_input_reaches_the_page(env: MiniwobEnv) -> None:
    begin(env, "enter-text")
    names = "mousedown mouseup mousemove click dblclick contextmenu keydown input wheel"
    value(
        env,
        f"window.heard = []; for (const kind of '{names}'.split(' ')) "
        "addEventListener(kind, (event) => heard.push(kind + (event.key ?? '')), true); 0",
    )

    def heard(action: Action) -> set[str]:
        env.step(action)
        return set(value(env, "heard.splice(0)"))  # type: ignore[call-overload, no-any-return]

    x, y = value(
        env,
        "(() => { const box = document.querySelector('#tt').getBoundingClientRect(); "
        "return [Math.round(box.left + 20), Math.round(box.top + 6)]; })()",
    )  # type: ignore[misc]
    assert {"mousedown", "mouseup", "click"} <= heard(Click(x=x, y=y))
    assert "contextmenu" in heard(Click(x=x, y=y, button="right"))
    assert {"keydowna", "input"} <= heard(Type(text="aÖ"))
    assert value(env, "document.querySelector('#tt').value") == "aÖ"
    assert "keydownBackspace" in heard(KeyPress(keys=["backspace"]))
    assert value(env, "document.querySelector('#tt').value") == "a"
    assert "dblclick" in heard(DoubleClick(x=x, y=y))
    assert value(env, "String(getSelection())") == "a"
    assert heard(Move(x=2, y=200)) == {"mousemove"}
    assert {"mousedown", "mousemove", "mouseup"} <= heard(Drag(path=[(5, 190), (90, 200)]))
    assert "wheel" in heard(Scroll(x=80, y=150, dy=1))
    assert heard(Wait(seconds=0)) == set()


def test_a_time_is_typed_as_people_write_it(env: MiniwobEnv) -> None:
    begin(env, "enter-time")
    value(env, "document.querySelector('#tt').focus()")
    env.step(Type(text="7:55 PM"))
    assert value(env, "document.querySelector('#tt').value") == "19:55"


@pytest.mark.parametrize("kind", ["color", "date", "datetime-local", "month", "time", "week"])
def test_no_field_opens_a_separate_window(env: MiniwobEnv, kind: str) -> None:
    begin(env, "enter-time")
    left, top, right, bottom = value(
        env,
        f"(() => {{ const field = document.querySelector('#tt'); field.type = '{kind}'; "
        "field.focus(); const box = field.getBoundingClientRect(); "
        "return [box.left, box.top, box.right, box.bottom].map(Math.round); })()",
    )  # type: ignore[misc]
    for keys in (["space"], ["f4"], ["alt", "down"], ["alt", "up"], ["enter"]):
        env.step(KeyPress(keys=keys))
    for x in range(left + 4, right, 4):
        env.step(Click(x=x, y=(top + bottom) // 2))


def test_slots_do_not_share_a_clipboard() -> None:
    suite = MiniwobSuite()
    one, other = suite.make_env(browsers=1), suite.make_env(browsers=1)
    try:
        for env, text in ((one, "first"), (other, "second")):
            begin(env, "enter-text")
            value(env, "document.querySelector('#tt').focus()")
            env.step(Type(text=text))
            env.step(KeyPress(keys=["ctrl", "a"]))
            env.step(KeyPress(keys=["ctrl", "c"]))
        for env, text in ((one, "first"), (other, "second")):
            env.step(KeyPress(keys=["end"]))
            env.step(KeyPress(keys=["ctrl", "v"]))
            assert value(env, "document.querySelector('#tt').value") == text * 2
    finally:
        one.close()
        other.close()


# --- verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [
        "click-button",  # one click
        "choose-list",  # a drop-down list
        "click-menu",  # hovering
        "click-scroll-list",  # clicks with ctrl held
        "login-user",  # typing
        "copy-paste",  # the clipboard
        "enter-date",
        "scroll-text-2",
        "social-media",  # scrolling to what is out of sight
        "drag-box",
        "drag-sort-numbers",
        "use-slider-2",
        "highlight-text",
        "form-sequence",
        "search-engine",  # several pages
        "email-inbox",
    ],
)
def test_the_oracle_passes(env: MiniwobEnv, page: str) -> None:
    assert [solve(env, page, seed) for seed in (1, 2)] == ["pass", "pass"]


def test_a_wrong_click_fails_and_reports_the_raw_reward(env: MiniwobEnv) -> None:
    begin(env, "click-test-2")
    x, y = value(
        env,
        "(() => { const box = document.querySelector('#subbtn2').getBoundingClientRect(); "
        "return [Math.round(box.left + 8), Math.round(box.top + 8)]; })()",
    )  # type: ignore[misc]
    _, reward, over, _, info = env.step(Click(x=x, y=y))
    verdict = env.evaluate()
    assert (over, reward, verdict.outcome, info["raw_reward"]) == (True, 0.0, "fail", -1)
    assert verdict.reward == 0.0, "no reward is below 0"
    assert "raw reward -1" in verdict.reason
    with pytest.raises(EnvError, match="over"):
        env.step(Click(x=x, y=y))


def test_done_alone_passes_no_task(env: MiniwobEnv) -> None:
    begin(env, "click-test")
    assert env.step(Done())[1:3] == (0.0, True)
    assert env.evaluate().outcome == "fail"


def test_a_partial_reward_does_not_pass(env: MiniwobEnv) -> None:
    begin(env, "click-checkboxes")
    value(env, "core.endEpisode(0.5, true), 0")
    assert env.step(Wait(seconds=0))[2]
    assert (env.evaluate().outcome, env.evaluate().reward) == ("fail", 0.5)


def test_leaving_the_page_fails(env: MiniwobEnv) -> None:
    for _ in range(5):  # the new document comes before, within or after a step
        begin(env, "click-test")
        value(env, "location.search = '?elsewhere', 0")
        wait_until(lambda: env.step(Wait(seconds=0))[2], "the page to be left")
        verdict = env.evaluate()
        assert verdict.outcome == "fail"
        assert "left" in verdict.reason


@pytest.mark.parametrize("elsewhere", ["about:blank", "enter-text.html"])
def test_the_episode_after_a_page_was_left_starts_on_the_tasks_page(
    env: MiniwobEnv, elsewhere: str
) -> None:
    begin(env, "click-test")
    value(env, f"location.href = {elsewhere!r}, 0")
    wait_until(lambda: env.step(Wait(seconds=0))[2], "the page to be left")
    assert "left" in env.evaluate().reason
    assert solve(env, "click-test", 7) == "pass"


def test_a_step_that_a_new_document_cuts_off_fails_too(env: MiniwobEnv) -> None:
    begin(env, "click-test")
    waits = "{complete: false, decode: () => new Promise(() => 0)}"  # an image that never comes
    leaves = f"location.search = '?elsewhere'; return [{waits}]"
    value(env, f"Object.defineProperty(document, 'images', {{get() {{ {leaves} }}}}), 0")
    assert env.step(Wait(seconds=0))[2]
    assert "left" in env.evaluate().reason


# --- what breaks --------------------------------------------------------------------------------


def test_a_crashed_page_is_invalid_and_replaced() -> None:
    env = MiniwobSuite().make_env()
    try:
        begin(env, "click-test")
        browser = browser_of(env)
        assert env._page is not None
        session = env._page._session
        with pytest.raises(EnvError):
            session.call("Page.crash")
        with pytest.raises(EnvError):
            env.step(Click(x=1, y=1))
        assert env.evaluate().outcome == "invalid"
        assert solve(env, "click-test", 1) == "pass"
        assert browser_of(env) == browser  # the pages of other slots are unharmed
    finally:
        env.close()


def test_a_hung_page_costs_its_deadline_and_is_replaced() -> None:
    env = MiniwobSuite().make_env(deadline_s=2.0)
    try:
        begin(env, "click-test")
        value(env, "document.querySelector('#subbtn').onclick = () => { for (;;); }, 0")
        x, y = env.oracle_action().x, env.oracle_action().y  # type: ignore[union-attr]
        with pytest.raises(EnvError, match="no answer"):
            env.step(Click(x=x, y=y))
        assert env.evaluate().outcome == "invalid"
        assert solve(env, "click-test", 1) == "pass"
    finally:
        env.close()


def test_a_killed_browser_is_replaced_for_all_slots() -> None:
    suite = MiniwobSuite()
    slots = [suite.make_env(browsers=1), suite.make_env(browsers=1)]
    try:
        for env in slots:
            begin(env, "click-test")
        first = browser_of(slots[0])
        assert browser_of(slots[1]) == first
        os.kill(first, signal.SIGKILL)
        for env in slots:
            with pytest.raises(EnvError):
                env.step(Click(x=1, y=1))
            assert env.evaluate().outcome == "invalid"
            assert solve(env, "click-test", 1) == "pass"
        assert browser_of(slots[0]) == browser_of(slots[1]) != first
        [host] = suite._hosts.values()
        assert host.starts == 2
        assert processes_of(first) == []
    finally:
        for env in slots:
            env.close()


def test_the_last_slot_ends_the_browser_and_removes_its_profile() -> None:
    before = profiles()
    suite = MiniwobSuite()
    slots = [suite.make_env(browsers=1), suite.make_env(browsers=1)]
    for env in slots:
        begin(env, "click-test")
    browser = browser_of(slots[0])
    slots[0].close()
    assert processes_of(browser)
    slots[1].close()
    slots[1].close()  # a second close is harmless
    assert processes_of(browser) == []
    assert profiles() <= before


def test_no_browser_outlives_a_killed_process() -> None:
    before = profiles()
    script = (
        "import time\n"
        "from envs.contract.registry import make_env\n"
        "env = make_env('miniwob')\n"
        "env.reset(seed=1, options={'task': 'miniwob/click-test'})\n"
        "print(env._page.browser.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        browser = int(owner.stdout.readline())
        assert processes_of(browser)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()  # type: ignore[union-attr]
    wait_until(lambda: not processes_of(browser), "the browser's end", every_s=0.05)
    assert profiles() - before  # no process could remove them
    remove_stale_profiles()
    assert profiles() <= before


def test_a_profile_removed_as_stale_while_it_is_made_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locks, lock = iter([remove_stale_profiles]), fcntl.flock

    def late(descriptor: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            next(locks, lambda: None)()  # as another process does meanwhile
        lock(descriptor, how)

    monkeypatch.setattr("envs.tools.browser.process.fcntl.flock", late)
    browser = BrowserProcess(find_chromium(), 1.0)
    assert next(locks, None) is None
    try:
        asyncio.run(until(lambda: command_of(browser.pid) != [""]))
        own = [path for path in profiles() if f"--user-data-dir={path}" in command_of(browser.pid)]
        assert len(own) == 1
    finally:
        browser.close()
    assert not own[0].exists()


def test_a_browser_that_cannot_be_started_leaves_no_descriptor_open(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    for _ in range(3):
        with pytest.raises(EnvError, match="cannot start"):
            BrowserProcess(tmp_path / "nothing", 1.0)
    assert descriptors() == before


# --- mistakes -----------------------------------------------------------------------------------


def test_a_missing_browser_names_the_install_step(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "chromium")
    env = MiniwobSuite().make_env(chromium=nowhere)
    message = "apt install chromium-headless-shell"
    with closing(env), pytest.raises(MissingPartError, match=message):
        begin(env, "click-test")
    with pytest.raises(MissingPartError, match="apt install"):
        check_parts("miniwob", {"chromium": nowhere})


def test_a_missing_package_names_the_install_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPartError, match=r"pip install -e '\.\[miniwob\]'"):
        check_parts("miniwob", {})


@pytest.mark.parametrize(
    "options", [{"scale": 0.5}, {"encoding": "gif"}, {"step_ms": -1}, {"deadline_s": 0}]
)
def test_a_wrong_option_is_named(options: dict[str, object]) -> None:
    with pytest.raises(TaskError, match=next(iter(options))):
        make_env("miniwob", **options)


def test_a_program_that_is_not_a_browser_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "chromium"
    script.write_text("#!/bin/sh\necho no display here >&2\nexit 3\n")
    script.chmod(0o755)
    before = profiles()
    env = MiniwobSuite().make_env(chromium=str(script))
    with pytest.raises(EnvError, match="no display here"):
        begin(env, "click-test")
    env.close()
    assert profiles() <= before


@pytest.mark.parametrize("page", ["social-media-all", "email-inbox", "daily-calendar"])
def test_the_first_scroll_after_a_page_was_loaded_is_in_the_next_screenshot(page: str) -> None:
    instance = MiniwobSuite().make_env(step_ms=0)
    with closing(instance):
        for seed in range(3):
            before = begin(instance, page, seed)
            after = instance.step(Scroll(x=80, y=150, dx=0, dy=2))[0]
            later = [instance.step(Wait(seconds=0))[0].screenshot for _ in range(4)]
            assert after.screenshot != before.screenshot
            assert set(later) == {after.screenshot}
