"""Promises of OSWorld's own evaluators: what they are given, what they may break, what is refused."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bus.errors import EnvError, MissingPartError
from envs.contract.actions import Done
from envs.contract.base import Verdict
from envs.suites.osworld import classify
from envs.suites.osworld.downloads import Downloads
from envs.suites.osworld.env import OsworldEnv
from envs.suites.osworld.suite import OsworldSuite

TODAY = {
    "cache_dir", "chromium_port", "controller", "current_use_proxy", "server_port",
    "setup_controller", "vlc_port", "vm_ip", "vm_machine", "vm_platform", "vm_screen_size",
}  # fmt: skip
"""What getters and metrics of two copies of OSWorld of May and July 2026 read of `env`.

`test_a_checkout_reads_nothing_else` reads it from a checkout.
"""

PACKAGE = {
    "__init__.py": "",
    "controllers/__init__.py": "",
    "controllers/python.py": """
import json, urllib.error, urllib.parse, urllib.request
class PythonController:
    def __init__(self, vm_ip, server_port):
        self.server = f"http://{vm_ip}:{server_port}"
    def get_vm_platform(self): return "Linux"
    def get_vm_machine(self): return "x86_64"
    def get_vm_screen_size(self): return {"width": 800, "height": 600}
    def get_file(self, path):
        form = urllib.parse.urlencode({"file_path": path}).encode()
        try:
            return urllib.request.urlopen(self.server + "/file", form).read()
        except urllib.error.HTTPError:
            return None
""",
    "controllers/setup.py": """
class SetupController:
    def __init__(self, vm_ip, server_port=5000, chromium_port=9222, vlc_port=8080,
                 cache_dir="cache", client_password="", screen_width=1920, screen_height=1080):
        self.folder = cache_dir
        self.given = f"{chromium_port} {vlc_port} {client_password} {screen_width}x{screen_height}"
    def _mark_setup(self, text): open(self.folder + "/mark", "w").write(text)
    def _note_setup(self): open(self.folder + "/mark", "w").write(self.given)
""",
    "evaluators/__init__.py": "",
    "evaluators/getters/__init__.py": """
import os
def get_mark(env, config):
    print('getters print')
    return open(env.cache_dir + config['path']).read()
def get_read(env, config): return [getattr(env, name) for name in config["names"]]
def get_here(env, config): return open(config["path"]).read()
def get_vm_file(env, config):
    multi = config.get("multi")
    pairs = zip(config["path"], config["dest"]) if multi else [(config["path"], config["dest"])]
    given = []
    for number, (path, dest) in enumerate(pairs):
        data = env.controller.get_file(path)
        if data is not None:
            open(os.path.join(env.cache_dir, dest), "wb").write(data)
        if number in config.get("gives", [0]):
            given.append(data if data is None else os.path.join(env.cache_dir, dest))
    return given if len(given) > 1 else given[0]
def get_cloud_file(env, config):
    path = os.path.join(env.cache_dir, config["dest"])
    if not os.path.exists(path):
        raise ConnectionError("getters fetch nothing here")
    return path
def get_cache_file(env, config):
    assert os.path.exists(os.path.join(env.cache_dir, config["path"]))
    return os.path.join(env.cache_dir, config["path"])
""",
    "evaluators/metrics/__init__.py": """
import os, time
def same(result, **options): return result == options['text']
def some(result, **options): return 0.4
def raises(result, **options): return 1 / 0
def sleeps(result, **options): time.sleep(600)
def ends(result, **options): os._exit(3)
def always(result, *expected, **options): return 1.0
def alike(result, expected): return float(open(result).read() == open(expected).read())
def both(results, expected): return float(all(alike(each, expected) for each in results))
""",
}
"""A replacement of OSWorld's package (3 GB, too large for these tests): its layout, not its content."""


def write_package(folder: Path) -> None:
    for name, text in PACKAGE.items():
        path = folder / "desktop_env" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def evaluators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write_package(tmp_path / "site")
    paths = [str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    classify.installed_parts.cache_clear()
    yield tmp_path / "site"
    classify.installed_parts.cache_clear()


@pytest.fixture
def own(xguest: Any, tmp_path: Path) -> Iterator[Callable[..., tuple[OsworldSuite, OsworldEnv]]]:
    """Makes a suite of one task, `own/task`, with an environment; closes it in the end."""
    envs: list[OsworldEnv] = []

    def make(
        evaluator: Mapping[str, Any],
        *,
        config: Any = (),
        folder: Path | None = None,
        **options: Any,
    ) -> tuple[OsworldSuite, OsworldEnv]:
        folder = folder or tmp_path / "tasks"
        folder.mkdir(parents=True, exist_ok=True)
        task = {"id": "task", "instruction": "Do it.", "config": list(config)}
        (folder / "task.json").write_text(json.dumps({**task, "evaluator": evaluator}))
        suite = OsworldSuite(folder, name="own")
        given = {"url": xguest.url, "pause_s": 0, "evaluator_python": sys.executable}
        envs.append(suite.make_env(**given, downloads=str(tmp_path / "kept"), **options))
        return suite, envs[-1]

    yield make
    for env in envs:
        env.close()


def verdict(env: OsworldEnv) -> Verdict:
    """That on an episode which ends at once."""
    env.reset(options={"task": "own/task"})
    env.step(Done())
    return env.evaluate()


def vm_file(path: Path, dest: str = "result.txt") -> dict[str, Any]:
    return {"type": "vm_file", "path": str(path), "dest": dest}


def cloud_file(url: str, dest: str = "gold.txt") -> dict[str, Any]:
    return {"type": "cloud_file", "path": url, "dest": dest}


# --- what they are given -----------------------------------------------------------------------


def judged(
    own: Any, func: str, path: str = "/mark", config: Any = None, **options: Any
) -> list[Verdict]:
    """The verdict on an episode, and on a second one with a sound evaluator."""
    verdicts = []
    for metric in (func, "same"):
        _, env = own(
            {"func": metric, "result": {"type": "mark", "path": path}, "options": {"text": "left"}},
            config=config or [{"type": "mark", "parameters": {"text": "left"}}],
            **options,
        )
        verdicts.append(verdict(env))
        env.close()
    return verdicts


def test_a_foreign_evaluator_judges_in_a_process_of_its_own(evaluators: Path, own: Any) -> None:
    assert [each.outcome for each in judged(own, "same")] == ["pass", "pass"]


def test_a_fractional_score_is_the_reward(evaluators: Path, own: Any) -> None:
    some, whole = judged(own, "some")
    assert (some.outcome, some.reward) == ("fail", 0.4)
    assert (whole.outcome, whole.reward) == ("pass", 1.0)


def test_getters_find_all_that_they_read_of_env_today(evaluators: Path, own: Any) -> None:
    result = {"type": "read", "names": sorted(TODAY)}
    _, env = own({"func": "always", "result": result})
    assert verdict(env).reason == "always: 1"


def test_a_checkout_reads_nothing_else() -> None:
    checkout = os.environ.get("DART_OSWORLD_CHECKOUT")
    if checkout is None:
        pytest.skip("set DART_OSWORLD_CHECKOUT to a checkout of OSWorld")
    read = {
        node.attr
        for path in Path(checkout, "desktop_env", "evaluators").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "env"
    }
    assert read <= TODAY
    assert "vm_ip" in read


def test_set_up_steps_are_told_ports_password_and_screen(
    evaluators: Path, own: Any, xguest: Any
) -> None:
    evaluator = {
        "func": "same",
        "result": {"type": "mark", "path": "/mark"},
        "options": {"text": "9223 8081 secret 800x600"},
    }
    suite, other = own(evaluator, config=[{"type": "note", "parameters": {}}])
    other.close()
    url = f"{xguest.url}?chromium_port=9223&vlc_port=8081"
    env = suite.make_env(url=url, pause_s=0, evaluator_python=sys.executable, password="secret")
    try:
        assert verdict(env).outcome == "pass"
    finally:
        env.close()


def test_the_interpreter_may_be_named_relative_to_the_working_directory(
    evaluators: Path, own: Any, xguest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "osworld-eval").symlink_to(sys.prefix)
    suite, other = own({"func": "always", "result": {"type": "read", "names": ["vm_ip"]}})
    other.close()
    python = f"osworld-eval/bin/{Path(sys.executable).name}"
    env = suite.make_env(url=xguest.url, pause_s=0, evaluator_python=python)
    try:
        assert verdict(env).outcome == "pass"
    finally:
        env.close()


@pytest.mark.parametrize("is_named", [False, True])
def test_evaluators_of_a_checkout_run_in_it(own: Any, tmp_path: Path, is_named: bool) -> None:
    checkout = tmp_path / "OSWorld"
    write_package(checkout)
    (checkout / "settings.yml").write_text("theirs")
    evaluator = {
        "func": "same",
        "result": {"type": "here", "path": "settings.yml"},
        "options": {"text": "theirs"},
    }
    folder = None if is_named else checkout / "evaluation_examples" / "examples"
    options = {"checkout": str(checkout)} if is_named else {}
    _, env = own(evaluator, folder=folder, **options)
    assert verdict(env).outcome == "pass"


def test_a_checkout_that_is_none_is_refused(own: Any, tmp_path: Path) -> None:
    with pytest.raises(MissingPartError, match="name a checkout of OSWorld"):
        own({"func": "always"}, checkout=str(tmp_path))


# --- reference files ---------------------------------------------------------------------------


def test_a_reference_is_fetched_once_for_all_episodes_of_all_environments(
    evaluators: Path, own: Any, web: Any, xguest: Any
) -> None:
    done_file = xguest.home / "done.txt"
    done_file.write_text("pears")
    gold = cloud_file(f"{web.url}/whole")
    for _ in range(2):
        _, env = own({"func": "alike", "result": vm_file(done_file), "expected": gold})
        assert [verdict(env).outcome for _ in range(2)] == ["pass"] * 2
        web.files.clear()  # the web may go away
        env.close()
    assert web.asked == ["/whole"]


def test_a_reference_is_there_when_the_episode_ends_whatever_the_web_and_other_slots_do(
    evaluators: Path, own: Any, web: Any, xguest: Any, tmp_path: Path
) -> None:
    done_file = xguest.home / "done.txt"
    done_file.write_text("pears")
    gold = cloud_file(f"{web.url}/whole")
    evaluator = {"func": "alike", "result": vm_file(done_file), "expected": gold}
    _, env = own(evaluator, downloads_gb=0)  # nothing is kept for long
    env.reset(options={"task": "own/task"})
    web.files["/other"] = b"what another slot fetches"
    Downloads(tmp_path / "kept", most_gb=0).fetch(f"{web.url}/other")
    web.files.clear()
    env.step(Done())
    assert env.evaluate().outcome == "pass"


def test_a_reference_that_cannot_be_fetched_costs_no_episode(
    evaluators: Path, own: Any, web: Any
) -> None:
    gold = cloud_file(f"{web.url}/none")
    _, env = own({"func": "alike", "result": vm_file(Path("/a")), "expected": gold})
    with pytest.raises(EnvError, match=r"cannot fetch .*/none"):
        env.reset(options={"task": "own/task"})


def test_a_result_is_never_compared_with_itself(
    evaluators: Path, own: Any, web: Any, xguest: Any
) -> None:
    wrong = xguest.home / "wrong.txt"
    wrong.write_text("apples")
    gold = cloud_file(f"{web.url}/whole", dest="same.css")
    _, env = own({"func": "alike", "result": vm_file(wrong, "same.css"), "expected": gold})
    assert verdict(env).outcome == "fail"
    wrong.write_text("pears")
    assert verdict(env).outcome == "pass"


def test_a_reference_stays_in_the_episodes_folder(evaluators: Path, own: Any, web: Any) -> None:
    gold = cloud_file(f"{web.url}/whole", dest="../../escaped.txt")
    _, env = own({"func": "alike", "result": {"type": "here"}, "expected": gold})
    assert "leaves the episode's folder" in verdict(env).reason


# --- what a policy may break -------------------------------------------------------------------


@pytest.mark.parametrize("func", ["alike", "always"])
@pytest.mark.parametrize("state", ["deleted", "a folder"])
def test_a_result_file_that_the_policy_deleted_is_a_failure(
    evaluators: Path, own: Any, web: Any, xguest: Any, tmp_path: Path, func: str, state: str
) -> None:
    lost = xguest.home / f"{tmp_path.name}.txt"
    if state == "a folder":
        lost.mkdir()
    gold = cloud_file(f"{web.url}/whole")
    _, env = own({"func": func, "result": vm_file(lost), "expected": gold})
    outcome = verdict(env)
    assert outcome.outcome == "fail"
    assert f"the guest has no file {lost}" in outcome.reason


def test_one_of_several_result_files_may_be_missing_only_if_the_metric_needs_it(
    evaluators: Path, own: Any, web: Any, xguest: Any
) -> None:
    done_file = xguest.home / "done.txt"
    done_file.write_text("pears")
    result = {
        "type": "vm_file",
        "multi": True,
        "path": [str(done_file), str(xguest.home / "no-such.csv")],
        "dest": ["a", "b"],
    }
    gold = cloud_file(f"{web.url}/whole")
    _, env = own({"func": "alike", "result": result, "expected": gold})
    assert verdict(env).outcome == "pass"
    env.close()
    _, env = own({"func": "both", "result": {**result, "gives": [0, 1]}, "expected": gold})
    outcome = verdict(env)
    assert (outcome.outcome, "no-such.csv" in outcome.reason) == ("fail", True)


def test_the_output_of_a_command_that_the_guest_refused_is_a_failure(
    evaluators: Path, own: Any
) -> None:
    saved = {"command": ["no-such-program"], "stdout": "said.out"}
    evaluator = {
        "func": "always",
        "result": {"type": "cache_file", "path": "said.out"},
        "postconfig": [{"type": "execute", "parameters": saved}],
    }
    _, env = own(evaluator)
    outcome = verdict(env)
    assert (outcome.outcome, "said.out" in outcome.reason) == ("fail", True)


@pytest.mark.parametrize(
    ("func", "reason"),
    [
        ("raises", "ZeroDivisionError"),
        ("sleeps", "no answer in 2 s"),
        ("ends", "its process ended"),
        ("unheard_of", "unheard_of"),
    ],
)
def test_a_foreign_evaluator_that_breaks_is_invalid_and_costs_one_episode(
    evaluators: Path, own: Any, func: str, reason: str
) -> None:
    limit_s = 2.0 if func == "sleeps" else 60.0
    first, following = judged(own, func, evaluator_s=limit_s)
    assert first.outcome == "invalid"
    assert reason in first.reason
    assert following.reason == "same: 1"


def test_a_missing_file_fails_as_in_osworld(evaluators: Path, own: Any) -> None:
    assert judged(own, "same", path="/other")[0].outcome == "fail"


# --- what is refused before any episode --------------------------------------------------------


@pytest.mark.parametrize(
    ("evaluator", "config", "lacks"),
    [
        ({"func": "unheard_of", "result": {"type": "mark"}}, (), "function unheard_of"),
        ({"func": "same", "result": {"type": "telepathy"}}, (), "getter telepathy"),
        ({"func": "infeasible"}, [{"type": "dance"}], "set-up step dance"),
        (
            {"func": "same", "result": {"type": "mark", "settings_file": "google/settings.json"}},
            (),
            "file google/settings.json",
        ),
    ],
)
def test_a_task_whose_function_is_missing_is_refused_by_name_with_the_cure(
    evaluators: Path, own: Any, xguest: Any, evaluator: Any, config: Any, lacks: str
) -> None:
    suite, _ = own(evaluator, config=config)
    asked = {"url": xguest.url, "evaluator_python": sys.executable}
    with pytest.raises(MissingPartError, match=r"own/task \(.*one checkout of OSWorld") as refused:
        suite.check_parts(**asked)
    assert f"({lacks})" in str(refused.value)
    assert str(evaluators) in str(refused.value)
    suite.check_parts(**asked, tasks=[])  # a run that does not play it is not refused


def test_an_installation_that_cannot_be_imported_is_refused_at_start(
    evaluators: Path, own: Any, xguest: Any
) -> None:
    getters = evaluators / "desktop_env" / "evaluators" / "getters" / "__init__.py"
    getters.write_text("import no_such_package_of_theirs")
    suite, _ = own({"func": "same", "result": {"type": "mark"}})
    with pytest.raises(MissingPartError, match="no_such_package_of_theirs"):
        suite.check_parts(url=xguest.url, evaluator_python=sys.executable)


def test_what_a_newer_osworld_reads_of_env_is_told_at_start(
    evaluators: Path, own: Any, xguest: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = evaluators / "desktop_env" / "evaluators" / "getters"
    read = "".join(f"    env.{name}\n" for name in sorted(TODAY))
    (folder / "today.py").write_text(f"def get_today(env, config):\n{read}")
    suite, _ = own({"func": "same", "result": {"type": "mark"}})
    asked = {"url": xguest.url, "evaluator_python": sys.executable}
    suite.check_parts(**asked)
    assert not caplog.records
    (folder / "newer.py").write_text("def get_newer(env, config): return env.vm_mood\n")
    classify.installed_parts.cache_clear()
    suite.check_parts(**asked)
    assert "newer.py: env.vm_mood" in caplog.text


# --- the real package --------------------------------------------------------------------------


def test_osworlds_own_evaluators_compare_files_of_the_guest(own: Any, xguest: Any) -> None:
    python = os.environ.get("DART_OSWORLD_PYTHON")
    if python is None:
        pytest.skip("set DART_OSWORLD_PYTHON to an interpreter that has the package desktop-env")
    evaluator = {
        "func": ["compare_text_file", "exact_match"],
        "result": [vm_file(xguest.home / "made.txt", "made.txt"), {"type": "vm_screen_size"}],
        "expected": [
            vm_file(xguest.home / "gold.txt", "gold.txt"),
            {"type": "rule", "rules": {"expected": {"width": 800, "height": 600}}},
        ],
    }
    (xguest.home / "gold.txt").write_text("two\nlines\n")
    suite, other = own(evaluator)
    other.close()
    checkout = os.environ.get("DART_OSWORLD_CHECKOUT", "")
    env = suite.make_env(url=xguest.url, pause_s=0, evaluator_python=python, checkout=checkout)
    try:
        verdicts = []
        for text in ("other", "two\nlines\n"):
            (xguest.home / "made.txt").write_text(text)
            verdicts.append(verdict(env))
    finally:
        env.close()
    assert [each.outcome for each in verdicts] == ["fail", "pass"], verdicts
