"""Promises of suite `web`: tasks on a real small application, in the real browser.

Where Chromium is not installed, these tests are skipped.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copytree

import psutil
import pytest

from bus.errors import EnvError, MissingPartError, NoOracleError, TaskError
from envs.contract.actions import Answer, Click, Done, Fail, Goto, Wait
from envs.contract.base import Verdict
from envs.contract.registry import check_parts, load_suite, longest_reset_s, make_env
from envs.suites.web.env import WebEnv
from envs.tools.browser.process import find_chromium
from tests.waiting import lives, wait_until

try:
    find_chromium()
except MissingPartError as missing:
    pytest.skip(str(missing), allow_module_level=True)

BOARD = Path(__file__).parent / "board"
HEAD = f"""
url = "http://127.0.0.1:{{port}}/?sid={{session}}"
start = ["{sys.executable}", "server.py", "--port", "{{port}}"]
ready = "document.body.dataset.ready"
size = [480, 360]
state = {{ get = "/state?sid={{session}}" }}
max_steps = 4
start_s = 600
"""

OWN = """
import json

def make(seed):
    return {"title": f"Card {seed}"}

def add(episode):
    episode.ask("post", f"/add?sid={episode.values['session']}", json={"title": episode.values["title"]})

def both(episode):
    for title in episode.values["titles"]:
        episode.ask("post", f"/add?sid={episode.values['session']}", json={"title": title})

def count(episode):
    state = episode.ask("get", f"/state?sid={episode.values['session']}").value()
    return len(state["cards"])

def half(episode):
    return 0.5, "half of it"

def broken(episode):
    raise KeyError("no such key")

def strange(episode):
    return "yes"
"""

Make = Callable[..., WebEnv]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes an environment of a file with the given tasks."""
    envs: list[WebEnv] = []
    place = tmp_path / "board"
    copytree(BOARD, place)
    (place / "own.py").write_text(OWN)

    def make_one(tasks: str, head: str = "", **options: object) -> WebEnv:
        path = place / f"file{len(envs)}.toml"
        path.write_text(HEAD + head + tasks)
        # A busy machine may be slow: what never comes is waited for by tests that shorten this.
        env = make_env(f"web:{path}", **{"deadline_s": 600.0, "patience_s": 600.0, **options})
        assert isinstance(env, WebEnv)
        envs.append(env)
        return env

    yield make_one
    for env in envs:
        env.close()


def task(checks: str, more: str = "", instruction: str = "Do it") -> str:
    return f'\n[[tasks]]\nid = "it"\ninstruction = "{instruction}"\n{more}\ncheck = [{checks}]\n'


def begin(env: WebEnv, task_id: str = "", seed: int = 0) -> str:
    task_id = task_id or next(iter(env._tasks))
    return str(env.reset(seed=seed, options={"task": task_id})[1]["instruction"])


def post(env: WebEnv, path: str, **body: object) -> None:
    """Change the application's state as a page would."""
    code = f"fetch({path!r} + '?sid=' + sid, {{ method: 'POST', body: JSON.stringify({body!r}) }}).then(() => 0)"
    env.gui.ask(code)


def solve(env: WebEnv) -> Verdict:
    over = False
    while not over:
        _, _, terminated, truncated, _ = env.step(env.oracle_action())
        over = terminated or truncated
    return env.evaluate()


# --- episodes ----------------------------------------------------------------------------------------


def test_a_solution_passes_and_doing_nothing_fails_on_fresh_instances(make: Make) -> None:
    env = make("".join((BOARD / "board.toml").read_text().partition("[[tasks]]")[1:]))
    instructions = set()
    for task_id in env._tasks:
        for seed in range(3):
            instructions.add(begin(env, task_id, seed))
            assert env.evaluate().outcome == "fail"
            assert solve(env).outcome == "pass", (task_id, seed)
    assert len(instructions) > 5
    first = begin(env, "file0/move", 1)
    assert begin(env, "file0/move", 1) == first


def test_the_same_seed_has_the_same_first_screen_and_a_session_of_its_own(make: Make) -> None:
    env = make(task("{ path = 'notes', equals = 'x' }"))
    screens, sessions = set(), set()
    for _ in range(3):
        screens.add(env.reset(seed=5, options={"task": "file0/it"})[0].screenshot)
        sessions.add(env.gui.ask("sid"))
    assert len(screens) == 1
    assert len(sessions) == 3


def test_a_change_beside_the_task_fails_it(make: Make) -> None:
    tasks = task("{ path = 'notes', equals = 'x' }", 'unchanged = [".", "!notes"]')
    tasks += tasks.replace('"it"', '"users"').replace('[".", "!notes"]', '["users"]')
    env = make(tasks)
    for task_id, outcome in (("file0/it", "fail"), ("file0/users", "pass")):
        begin(env, task_id)
        post(env, "/notes", notes="x")
        assert env.evaluate().outcome == "pass"
        post(env, "/add", title="Milk")
        assert env.evaluate().outcome == outcome
    begin(env, "file0/users")
    post(env, "/notes", notes="x")
    post(env, "/users", users=["Ann"])
    verdict = env.evaluate()
    assert (verdict.outcome, verdict.reward) == ("fail", 0.0)
    assert verdict.reason == "changed beside the task: users had 2 entries, has 1"


@pytest.mark.parametrize(
    ("checks", "reward"),
    [
        ("{ path = 'notes', equals = 'x' }, { path = 'users[0]', equals = 'Ann' }", 0.0),
        (
            "{ path = 'notes', equals = 'x', weight = 3 }, { path = 'users[0]', equals = 'Ann' }",
            0.25,
        ),
        (
            "{ any = [{ path = 'notes', equals = 'x' }, { path = 'users[0]', equals = 'Ann' }] }",
            1.0,
        ),
        ("{ any = [{ path = 'notes', equals = 'x' }, { path = 'users[0]', equals = 'Bo' }] }", 0.0),
        ("{ all = [{ path = 'users', length = 2 }, { path = 'cards', length = 0 }] }", 1.0),
        ("{ path = 'users', contains = 'Bo', lacks = 'Cy' }", 1.0),
        ("{ path = 'users', lacks = 'Bo' }", 0.0),
        ("{ path = 'users[1]', matches = '^B' }", 1.0),
        ("{ path = 'cards', length = 1 }", 0.0),
        ("{ path = 'cards[title=Milk]', exists = false }", 1.0),
        ("{ path = 'cards[title=Milk]', exists = true }", 0.0),
        ("{ path = 'missing', equals = 1 }", 0.0),
        ("{ get = '/state?sid={session}', path = 'users[0]', equals = 'Ann' }", 1.0),
        ("{ get = '/nothing', status = 404 }", 1.0),
        ("{ get = '/nothing', status = 200 }", 0.0),
        ("{ script = 'document.title', equals = 'Board' }", 1.0),
        ("{ script = 'values.seed === 0 && document.title === \"Board\"' }", 1.0),
        ("{ script = 'new Promise((done) => setTimeout(done, 500, 0.25))' }", 0.25),
        ("{ script = '@check.js' }", 1.0),
        ("{ python = 'own.py:count', equals = 0 }", 1.0),
        ("{ python = 'own.py:count', at_least = 1 }", 0.0),
        ("{ python = 'own.py:half' }", 0.5),
        ("{ python = 'own.py:half', weight = 1 }, { path = 'users', length = 2 }", 0.75),
        ("{ read = 'address', matches = '/[?]sid=' }", 1.0),
        ("{ read = 'answer', equals = '42' }", 0.0),
    ],
)
def test_a_check_reads_its_value_and_judges_it(
    make: Make, tmp_path: Path, checks: str, reward: float
) -> None:
    (tmp_path / "board" / "check.js").write_text("// the title\ndocument.title === 'Board';\n")
    env = make(task(checks))
    begin(env)
    verdict = env.evaluate()
    assert (verdict.outcome, verdict.reward) == ("pass" if reward == 1 else "fail", reward)


@pytest.mark.parametrize(
    ("checks", "reason"),
    [
        ("{ get = '/broken', path = 'x', equals = 1 }", "/broken: status 500: it broke"),
        ("{ get = '/nothing', equals = 1 }", "/nothing: status 404: not there"),
        ("{ get = '/die', equals = 1 }", "the server ended with exit code 3"),
        ("{ get = 'http://127.0.0.1:9/', equals = 1 }", "refused"),
        ("{ script = 'nothing.there' }", "script 'nothing.there': the page threw ReferenceError"),
        ("{ script = '7' }", "script '7' must give true, false or a number from 0 to 1, got 7"),
        ("{ python = 'own.py:broken' }", "own.py:broken: KeyError: 'no such key'"),
        (
            "{ python = 'own.py:strange' }",
            'must give true, false or a number from 0 to 1, got "yes"',
        ),
        ("{ python = 'own.py:cuont' }", "own.py has no 'cuont'; did you mean 'count'?"),
    ],
)
def test_a_check_that_cannot_be_evaluated_is_invalid_and_no_failure(
    make: Make, checks: str, reason: str
) -> None:
    env = make(task(checks))
    begin(env)
    verdict = env.evaluate()
    assert verdict.outcome == "invalid"
    assert verdict.reward is None
    assert reason in verdict.reason


def test_a_task_is_set_up_by_requests_scripts_and_functions(make: Make) -> None:
    more = """draw = "own.py:make"
    setup = [{ python = "own.py:add" }, { post = "/notes?sid={session}", json = { notes = "{title}!" } },
             { script = "localStorage.setItem('user', values.title)" }]"""
    env = make(
        task(
            "{ script = 'localStorage.getItem(\"user\")', equals = '{title}' }", more, "Do {title}"
        )
    )
    assert begin(env, seed=7) == "Do Card 7"
    assert env.evaluate().outcome == "pass"
    state = env.gui.ask("fetch('/state?sid=' + sid).then((answer) => answer.json())")
    assert isinstance(state, dict)
    assert state["cards"] == [{"title": "Card 7", "list": "Inbox"}]
    assert state["notes"] == "Card 7!"


def test_a_function_that_draws_too_little_is_an_error_of_its_episode(make: Make) -> None:
    env = make(task("{ path = 'notes', equals = '{text}' }", 'draw = "own.py:make"'))
    with pytest.raises(
        EnvError, match=r"own.py:make: task 'it', check\[0\].equals: \{text\} is nothing"
    ):
        begin(env)


def test_an_answer_is_checked_and_ends_the_episode(make: Make) -> None:
    more = 'draw = { n = { integer = [42, 42] } }\nsolution = [{ answer = "{n}" }]'
    env = make(task("{ read = 'answer', equals = '{n}' }", more))
    begin(env)
    _, reward, terminated, _, _ = env.step(Answer(text="41"))
    assert (reward, terminated, env.evaluate().outcome) == (0.0, True, "fail")
    begin(env)
    assert env.oracle_action() == Answer(text="42")
    assert solve(env).outcome == "pass"


def test_only_the_action_fail_passes_a_task_that_cannot_be_done(make: Make) -> None:
    env = make('\n[[tasks]]\nid = "it"\ninstruction = "Fly"\nfeasible = false\n')
    for action, outcome in ((Done(), "fail"), (Fail(), "pass")):
        begin(env)
        assert env.evaluate().outcome == "fail"
        env.step(action)
        assert env.evaluate().outcome == outcome


def test_an_episode_ends_at_its_limit_and_a_free_one_goes_on(make: Make) -> None:
    env = make(task("{ path = 'notes', equals = 'x' }"))
    for free, last in ((False, True), (True, False)):
        env.reset(seed=0, options={"task": "file0/it", "free": free})
        truncated = [env.step(Wait(seconds=0))[3] for _ in range(4)]
        assert truncated == [False, False, False, last]


def test_a_solution_that_was_left_or_that_finds_nothing_says_so(make: Make) -> None:
    tasks = task(
        "{ path = 'notes', equals = 'x' }", "solution = [{ click = 'button', text = 'Nope' }]"
    )
    tasks += tasks.replace('"it"', '"no"').replace(
        "solution = [{ click = 'button', text = 'Nope' }]", ""
    )
    env = make(tasks)
    begin(env)
    with pytest.raises(
        EnvError, match=r"it: solution\[0\]: no element button with the text 'Nope'"
    ):
        env.oracle_action()
    env.step(Click(x=1, y=1))
    with pytest.raises(EnvError, match="does not apply after other actions"):
        env.oracle_action()
    begin(env, "file0/no")
    with pytest.raises(NoOracleError):
        env.oracle_action()


def test_an_entry_of_a_list_is_filled_into_addresses_and_selectors(make: Make) -> None:
    more = """draw = { titles = { sample = [["it's & so", 'say "hi"'], 2] } }
    setup = [{ python = "own.py:both" }, { get = "/state?sid={session}&of={titles[0]}" }]
    solution = [{ choose = ".card[data-title='{titles[1]}'] select", text = "Done" }]"""
    env = make(task("{ path = 'cards[title={titles[1]}].list', equals = 'Done' }", more))
    for seed in range(3):
        begin(env, seed=seed)
        assert solve(env).outcome == "pass"


def test_a_solution_scrolls_to_what_is_out_of_sight(make: Make) -> None:
    setup = "setup = [{ script = \"void (document.body.style.paddingTop = '1500px')\" }]"
    more = (
        f"{setup}\nsolution = [{{ click = '#title' }}, {{ type = 'Milk' }}, {{ click = '#add' }}]"
    )
    env = make(
        task("{ path = 'cards[0].title', equals = 'Milk' }", more).replace(
            "[[tasks]]", "[[tasks]]\nmax_steps = 30"
        )
    )
    begin(env)
    assert solve(env).outcome == "pass"


# --- faults -----------------------------------------------------------------------------------------


def test_a_server_that_dies_costs_one_episode_and_is_started_again(make: Make) -> None:
    env = make(task("{ path = 'notes', equals = 'x' }"))
    begin(env)
    env.gui.ask("fetch('/die').then(() => 0, () => 0)")
    verdict = env.evaluate()
    assert verdict.outcome == "invalid"
    assert "the server ended with exit code 3; it wrote last: board at port" in verdict.reason
    begin(env)
    post(env, "/notes", notes="x")
    assert env.evaluate().outcome == "pass"


def test_a_server_that_hangs_costs_one_episode(make: Make) -> None:
    tasks = task("{ path = 'notes', equals = '' }")
    tasks += tasks.replace('"it"', '"hang"').replace("path = 'notes'", "get = '/hang'")
    env = make(tasks)
    begin(env, "file0/hang")
    assert env._scene is not None
    env._scene.deadline_s = 3.0
    verdict = env.evaluate()
    assert verdict.outcome == "invalid"
    assert "/hang: no" in verdict.reason
    begin(env, "file0/it")
    assert env.evaluate().outcome == "pass"


def test_a_browser_that_is_killed_costs_one_episode(make: Make) -> None:
    env = make(task("{ path = 'notes', equals = '' }"))
    begin(env)
    pid = env.gui.visit.browser.pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not lives(pid))
    with pytest.raises(EnvError, match="Chromium"):
        env.step(Wait(seconds=0))
    assert env.evaluate().outcome == "invalid"
    begin(env)
    assert env.evaluate().outcome == "pass"


def test_a_setup_that_fails_names_its_step(make: Make) -> None:
    env = make(
        task("{ path = 'notes', equals = '' }", "setup = [{ get = '/state' }, { get = '/broken' }]")
    )
    with pytest.raises(EnvError, match=r"it: setup\[1\]: GET .*/broken: status 500: it broke"):
        begin(env)


def test_a_fresh_server_has_nothing_of_the_episode_before(make: Make) -> None:
    env = make(task("{ get = '/state', path = 'notes', equals = 'x' }"), "fresh = true\n")
    for _ in range(2):
        begin(env)
        assert env.evaluate().outcome == "fail"
        env.gui.ask(
            "fetch('/notes', { method: 'POST', body: JSON.stringify({ notes: 'x' }) }).then(() => 0)"
        )
        assert env.evaluate().outcome == "pass"


def test_two_environments_play_at_once_and_leave_nothing_behind(make: Make) -> None:
    tasks = task(
        "{ path = 'cards[0].title', equals = '{title}' }",
        """draw = { title = ["a", "b", "c"] }
    solution = [{ click = '#title' }, { type = '{title}' }, { click = '#add' }]""",
    )
    others = set(psutil.Process().children(recursive=True))  # of tests before this one
    envs = [make(tasks), make(tasks)]

    def play(env: WebEnv) -> set[str]:
        outcomes = set()
        for seed in range(4):
            begin(env, seed=seed)
            outcomes.add(solve(env).outcome)
        return outcomes

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(play, envs)) == [{"pass"}, {"pass"}]
    pids = [env.gui.visit.browser.pid for env in envs]
    below = [each.pid for each in {*psutil.Process().children(recursive=True)} - others]
    assert set(pids) <= set(below)
    downloads = [env.gui.visit.downloads for env in envs]
    for env in envs:
        env.close()
        env.close()
        with pytest.raises(EnvError, match="closed"):
            env.reset(options={"task": "file0/it"})
    wait_until(lambda: not any(map(lives, below)))
    assert not any(folder.exists() for folder in downloads)


def test_other_hosts_are_not_reached_by_an_action(make: Make) -> None:
    env = make(task("{ read = 'address', contains = '127.0.0.1' }"))
    begin(env)
    env.step(Goto(url="http://localhost:1/"))
    env.step(Goto(url="file:///etc/hostname"))
    assert env.evaluate().outcome == "pass"


def test_a_policy_that_leaves_the_application_fails_and_is_not_invalid(make: Make) -> None:
    env = make(task("{ script = 'document.title', equals = 'Board' }"))
    begin(env)
    env.gui.ask("void (location.href = 'http://elsewhere.example/')")
    env.step(Wait(seconds=0.5))
    assert env.evaluate() == Verdict("fail", "the application was left")
    env = make(task("{ any = [{ script = 'true' }, { path = 'notes', equals = '' }] }"))
    begin(env)
    env.gui.ask("void (location.href = 'http://elsewhere.example/')")
    env.step(Wait(seconds=0.5))
    assert env.evaluate().outcome == "pass"


# --- before anything starts ---------------------------------------------------------------------------


def test_what_is_missing_is_said_before_anything_starts(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "board" / "other.toml"
    path.write_text(
        HEAD.replace(sys.executable, "no-such-program") + task("{ path = 'notes', equals = '' }")
    )
    with pytest.raises(MissingPartError, match="start: there is no program 'no-such-program'"):
        check_parts(f"web:{path}", {})
    path.write_text(HEAD + task("{ path = 'notes', equals = '' }"))
    path = path.rename(path.with_name("good.toml"))  # a suite is loaded once
    check_parts(f"web:{path}", {})
    assert longest_reset_s(f"web:{path}", {"deadline_s": 10.0}) == 610.0
    with pytest.raises(TaskError, match="no option 'speed'"):
        make_env(f"web:{path}", speed=1)
    with pytest.raises(TaskError, match="has no task 'good/move'"):
        make_env(f"web:{path}").reset(options={"task": "good/move"})
    assert list(load_suite(f"web:{path}").tasks) == ["good/it"]
