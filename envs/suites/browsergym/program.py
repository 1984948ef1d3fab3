"""The program that plays BrowserGym's tasks, in an interpreter that has the package `browsergym`.

It runs as `python -c SOURCE` and is never imported; envs/tools/child_program.py defines the protocol. Its
requests and their answers:

    {"do": "list"}   ->  the registered tasks, and the packages that could not be loaded
    {"do": "reset"}  ->  the goal and its images, and the first screen
    {"do": "act", "calls": [[name, argument, ...], ...]}  ->  the reward and the screen after the calls
    {"do": "evaluate"}  ->  the reward of the present state
    any error        ->  {"error": "one line"}

A call is the name of a method of `Hands` with plain values as arguments; no code is built from them.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import json
import os
import pkgutil
import threading
import time
from importlib.resources import files
from typing import Any

ORPHAN_POLL_S = 1.0
EPISODES_A_BROWSER = 50
TRIES, TRY_AGAIN_S = 8, 0.25
LEAVING = (
    "Execution context was destroyed",
    "Cannot find context",
    "Frame was detached",
    "Frame has been detached",
    "Frame with the given frameId is not found",
    "Not attached to an active page",
    "Cannot mark a child frame without a bid",
)
"""Parts of the errors of Playwright and BrowserGym for a page that is just being replaced by another."""
SHOWS_PAGE = "window.dispatchEvent(new Event('pageshow', {bubbles: true, cancelable: false}))"


def main() -> None:
    """Answer requests until stdin ends."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what tasks print goes to the log
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    player = Player()
    for line in requests:
        answer, blobs = player.answer(json.loads(line))
        if blobs:
            answer["blobs"] = [len(blob) for blob in blobs]
        answers.write(json.dumps(answer).encode() + b"\n" + b"".join(blobs))
        answers.flush()
    player.close()


def end_with(parent: int) -> None:
    """End this process once its parent is gone; the browser then loses its pipe, and ends too."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_POLL_S)
    os._exit(1)


def describe_error(error: BaseException) -> str:
    """Return the error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def load_packages(only: str = "") -> dict[str, str]:
    """Import every package that registers tasks, or only `only`; return those that failed, and why.

    Some packages load torch, so that one alone is imported where it is enough.
    """
    browsergym: Any = importlib.import_module("browsergym")
    names = [
        f"browsergym.{module.name}"
        for module in pkgutil.iter_modules(browsergym.__path__)
        if module.name not in ("core", "utils", "experiments")  # which register none
    ]
    names += [
        name for name in os.environ.get("DART_BROWSERGYM_PACKAGES", "").split(",") if name.strip()
    ]
    failed = {}
    for name in map(str.strip, names):
        if only in ("", name.rpartition(".")[2]):
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - reported when its tasks are played
                failed[name] = describe_error(error)
    return failed


def registered() -> dict[str, Any]:
    """Return the ids of all tasks without their prefix, and the packages that could not be loaded."""
    core: Any = importlib.import_module("browsergym.core")
    gymnasium: Any = importlib.import_module("gymnasium")
    failed = load_packages()
    prefix = "browsergym/"
    ids = [name.removeprefix(prefix) for name in gymnasium.registry if name.startswith(prefix)]
    infeasible = [f"webarena.{number}" for number in unachievable()]
    return {
        "version": core.__version__,
        "tasks": ids,
        "infeasible": [task for task in infeasible if task in ids],
        "failed": failed,
    }


def unachievable() -> list[int]:
    """Return the tasks of WebArena whose answer is that they cannot be done."""
    try:
        webarena: Any = importlib.import_module("webarena")
        configs = json.loads(files(webarena).joinpath("test.raw.json").read_text("utf-8"))
        answers = [
            (config["task_id"], config["eval"].get("reference_answers")) for config in configs
        ]
        return [task for task, answer in answers if (answer or {}).get("fuzzy_match") == "N/A"]
    except Exception:  # noqa: BLE001 - another version of the package, or none
        return []


class QuietChat:
    """The messages of an episode.

    BrowserGym's own class shows them in a second browser, which is not needed.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self.messages: list[dict[str, Any]] = []

    def add_message(self, role: str, msg: str) -> None:
        """Keep a message as BrowserGym does."""
        if role not in ("user", "user_image", "assistant", "info", "infeasible"):
            raise ValueError(f"Invalid role: {role}")
        if role != "info":
            self.messages.append({"role": role, "timestamp": time.time(), "message": msg})

    def wait_for_user_message(self) -> None:
        """Return at once, since there is no user."""

    def close(self) -> None:
        """Nothing to free."""


class KeptBrowser:
    """A browser that several episodes use, each with its own context; BrowserGym would start one for each."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser

    def __getattr__(self, name: str) -> Any:
        return getattr(self._browser, name)

    def close(self) -> None:
        """Close the contexts that the episode left; KeptPlaywright closes the browser itself."""
        for context in self._browser.contexts:
            context.close()


class KeptPlaywright:
    """Playwright with a `launch` that returns one browser for several episodes. It is its own `chromium`."""

    def __init__(self, playwright: Any) -> None:
        self._playwright = playwright
        self._browser: Any = None
        self._launch_options: dict[str, Any] = {}  # of the browser in use
        self._episodes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._playwright, name)

    @property
    def chromium(self) -> Any:
        """The object that has `launch`: this one."""
        return self

    def launch(self, **options: Any) -> KeptBrowser:
        """Return the browser in use, or start one if it ended, is worn out or has other options."""
        self._episodes += 1
        fits = options == self._launch_options and self._episodes <= EPISODES_A_BROWSER
        if self._browser is None or not fits or not self._browser.is_connected():
            if self._browser is not None:
                self._browser.close()
            self._browser = self._playwright.chromium.launch(**options)
            self._launch_options, self._episodes = options, 1
        return KeptBrowser(self._browser)


class Hands:
    """The calls of a step: mouse, keyboard, pages, messages. Points are in pixels of the screenshot."""

    def __init__(self, env: Any, send: Any, report: Any) -> None:
        self._env = env
        self._send = send
        self._report = report

    @property
    def _page(self) -> Any:
        return self._env.page

    def _scaled(self, *numbers: float) -> list[float]:
        scale = scale_of(self._page)
        return [number / scale for number in numbers]

    def move(self, x: float, y: float, steps: int) -> None:
        """Move the pointer, in steps."""
        self._page.mouse.move(*self._scaled(x, y), steps=int(steps))

    def button_down(self, button: str, count: int) -> None:
        """Press a button."""
        self._page.mouse.down(button=button, click_count=int(count))

    def button_up(self, button: str, count: int) -> None:
        """Release a button."""
        self._page.mouse.up(button=button, click_count=int(count))

    def wheel(self, dx: float, dy: float) -> None:
        """Turn the wheel, in CSS pixels."""
        self._page.mouse.wheel(dx, dy)

    def key_down(self, key: str) -> None:
        """Press a key."""
        self._page.keyboard.down(key)

    def key_up(self, key: str) -> None:
        """Release a key."""
        self._page.keyboard.up(key)

    def type(self, text: str) -> None:
        """Type a text."""
        self._page.keyboard.type(text)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self._page.wait_for_timeout(seconds * 1000)

    def goto(self, url: str) -> None:
        """Open an address."""
        self._page.goto(url)

    def back(self) -> None:
        """Go back to the previous page."""
        self._page.go_back()

    def forward(self) -> None:
        """Go forward to the next page."""
        self._page.go_forward()

    def reload(self) -> None:
        """Load the page again."""
        self._page.reload()

    def new_tab(self) -> None:
        """Open a tab, which becomes the active one."""
        self._show(self._page.context.new_page())

    def close_tab(self) -> None:
        """Close the active tab; the last of the others becomes active, or a new one."""
        context = self._page.context
        self._page.close()
        self._show(context.pages[-1] if context.pages else context.new_page())

    def tab(self, index: int) -> None:
        """Activate a tab by its number; negative numbers count from the end."""
        self._show(self._page.context.pages[int(index)])

    def turn_tab(self, by: int) -> None:
        """Activate the tab after the active one, or before it."""
        pages = self._page.context.pages
        self._show(pages[(pages.index(self._page) + int(by)) % len(pages)])

    def message(self, text: str) -> None:
        """Send the user a text, which is the answer."""
        self._send(str(text))

    def infeasible(self, reason: str) -> None:
        """Report that the task cannot be done."""
        self._report(str(reason))

    def _show(self, page: Any) -> None:
        page.bring_to_front()
        page.evaluate(SHOWS_PAGE)  # the event by which BrowserGym notes the active page


CALLS = {name for name in vars(Hands) if not name.startswith("_")}


class Player:
    """Answers requests with one BrowserGym environment at a time."""

    def __init__(self) -> None:
        self._env: Any = None
        self._playwright: KeptPlaywright | None = None

    def answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        """Perform a request and return the answer and its blobs; an exception becomes an answer too."""
        try:
            what = request["do"]
            if what == "list":
                return registered(), []
            if what == "reset":
                return self._reset(request)
            if self._env is None:
                raise RuntimeError("no task is being played")
            if what == "act":
                return self._act(request)
            return self._reward_of(self._env.post_step({})[1:]), []
        except Exception as error:  # noqa: BLE001 - whatever a task raises makes its episode invalid
            return {"error": describe_error(error)}, []

    def close(self) -> None:
        """Close the browser."""
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _reset(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        environment: Any = importlib.import_module("browsergym.core.env")
        gymnasium: Any = importlib.import_module("gymnasium")
        self.close()
        full, package = f"browsergym/{request['task']}", request["task"].partition(".")[0]
        failed: dict[str, str] = {}
        for only in (package, ""):
            if full not in gymnasium.registry:
                failed |= load_packages(only)
        if full not in gymnasium.registry:
            why = next((f": {why}" for name, why in failed.items() if name.endswith(package)), "")
            raise LookupError(f"BrowserGym has no task {request['task']!r} here{why}")
        if self._playwright is None:
            core: Any = importlib.import_module("browsergym.core")
            self._playwright = KeptPlaywright(core._get_global_playwright())  # noqa: SLF001
            environment._get_global_playwright = lambda: self._playwright  # noqa: SLF001
            environment.Chat = QuietChat
        viewport = request["viewport"]
        wrapped = gymnasium.make(
            full,
            disable_env_checker=True,
            headless=True,
            slow_mo=0,
            pre_observation_delay=request["pause_s"],
            action_mapping=None,
            use_raw_page_output=True,  # else the DOM and the accessibility tree are read at each step
            viewport=viewport and {"width": viewport[0], "height": viewport[1]},
            pw_chromium_kwargs={"executable_path": request["chromium"]},
            task_kwargs=request["task_options"],
        )
        self._env = wrapped.unwrapped
        observation, _ = self._env.reset(seed=request["seed"])
        texts, images = [], []
        for part in observation["goal_object"]:
            if part["type"] == "text":
                texts.append(part["text"])
            else:
                images.append(image_of(part["image_url"]))
        screen, blobs = self._screen(request)
        goal = {"goal": "\n".join(texts), "images": len(images)}
        return {**goal, **screen}, [*blobs, *images]

    def _act(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        playwright: Any = importlib.import_module("playwright.sync_api")
        env = self._env
        info, send, report = env.pre_step()
        env.last_action, env.last_action_error = json.dumps(request["calls"]), ""
        hands = Hands(env, send, report)
        try:
            for name, *arguments in request["calls"]:
                if name not in CALLS:
                    raise ValueError(f"no call {name!r}")
                getattr(hands, name)(*arguments)
        except (playwright.Error, IndexError) as error:
            # As in BrowserGym: what cannot be done does nothing. A browser that died is found below.
            env.last_action_error = describe_error(error)
        return self._reward_and_screen(info, request)

    def _reward_and_screen(
        self, info: dict[str, Any], request: dict[str, Any]
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Return the reward and the screen; try again if the page was being replaced meanwhile."""
        playwright: Any = importlib.import_module("playwright.sync_api")
        for tries_left in reversed(range(TRIES)):
            try:
                _, *rest = self._env.post_step(info)
                screen, blobs = self._screen(request)
            except playwright.Error as error:
                if not tries_left or not any(phrase in str(error) for phrase in LEAVING):
                    raise
                time.sleep(TRY_AGAIN_S)
            else:
                return {**self._reward_of(rest), **screen}, blobs
        raise AssertionError("the last try returns or raises")

    def _reward_of(self, step_result: Any) -> dict[str, Any]:
        """Return the fields of an answer from BrowserGym's (reward, terminated, truncated, info)."""
        reward, terminated, _, info = step_result
        error = (info.get("task_info") or {}).get("error", "")
        why = {"why": str(error), "action_error": self._env.last_action_error}
        return {"reward": float(reward), "ended": bool(terminated), **why}

    def _screen(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        page = self._env.page
        shot = screenshot(page)
        answer: dict[str, Any] = {"url": page.url}
        if request["tree"]:
            answer["widgets"] = widgets_of(page)
        return answer, [shot]


def scale_of(page: Any) -> float:
    """Return the pixels of a screenshot per CSS pixel, which a task of BrowserGym may set."""
    return float(getattr(page, "_bgym_scale_factor", 1.0))


def screenshot(page: Any) -> bytes:
    """Return a screenshot of the viewport as PNG, as in BrowserGym's observations."""
    scale, size = scale_of(page), page.viewport_size
    session = session_of(page)
    metrics = {**size, "deviceScaleFactor": scale, "mobile": False}
    if scale != 1.0:
        session.send("Emulation.setDeviceMetricsOverride", metrics)
    shot = session.send("Page.captureScreenshot", {"format": "png"})
    if scale != 1.0:
        session.send("Emulation.setDeviceMetricsOverride", {**metrics, "deviceScaleFactor": 1.0})
    return base64.b64decode(shot["data"])


def session_of(page: Any) -> Any:
    """Return a page's session for all its screenshots, since making one takes longer than a screenshot."""
    if getattr(page, "dart_session", None) is None:
        page.dart_session = page.context.new_cdp_session(page)
    return page.dart_session


def image_of(url: Any) -> bytes:
    """Return the bytes of a goal's image, which is a data URL."""
    address = url["url"] if isinstance(url, dict) else url
    head, comma, data = str(address).partition(",")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        raise ValueError(f"an image of the goal is no data URL: {str(address)[:80]}")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"an image of the goal cannot be read: {error}") from None


def widgets_of(page: Any) -> list[list[Any]]:
    """Return role, name, text and box of each visible widget, as BrowserGym itself reads the page."""
    reading: Any = importlib.import_module("browsergym.core.observation")
    reading._pre_extract(page, lenient=True)  # noqa: SLF001 - there is no public name for it
    try:
        dom = reading.extract_dom_snapshot(page)
        tree = reading.extract_merged_axtree(page)
        properties = reading.extract_dom_extra_properties(dom, scale_factor=scale_of(page))
    finally:
        reading._post_extract(page)  # noqa: SLF001
    widgets = []
    for node in tree["nodes"]:
        about = properties.get(node.get("browsergym_id"))
        if about is None or about["bbox"] is None or not about["visibility"] >= 0.5:
            continue
        words = [
            str((node.get(key) or {}).get("value", "")).strip() for key in ("role", "name", "value")
        ]
        widgets.append([*words, [round(number) for number in about["bbox"]]])
    return widgets


if __name__ == "__main__":
    main()
