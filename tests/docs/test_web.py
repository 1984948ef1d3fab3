"""What docs/environments/web.md shows can be used as it is, and it names every key."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.errors import MissingPartError
from envs.suites.web.env import WebEnv, WebSuite
from envs.suites.web.file import read_file
from envs.suites.web.schema import METHODS, MOVES, WANTS, Application, WebTask
from envs.tools.browser.process import find_chromium

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "environments" / "web.md").read_text(encoding="utf-8")

SERVER = '''
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer("hello" if "token=1" in self.headers.get("Cookie", "") else "log in")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer("", "token=1; HttpOnly")

    def answer(self, text, cookie=""):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        if cookie:
            self.send_header("Set-Cookie", cookie)
        self.end_headers()
        self.wfile.write(f"<body>{text}".encode())

    def log_message(self, *_):
        """Print nothing."""


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
'''
"""A page that greets the user who has logged in."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_shown_file_is_read(tmp_path: Path) -> None:
    application, task, _ = blocks("toml")
    path = tmp_path / "shown.toml"
    path.write_text(f"{application}\n{task}", encoding="utf-8")
    assert [each.id for each in read_file(path).application.tasks] == ["invite"]


def test_every_key_is_named() -> None:
    keys = {*Application.model_fields, *WebTask.model_fields, *METHODS, *WANTS, *MOVES} - {"tasks"}
    assert {key for key in keys if f"`{key}`" not in PAGE} == set()


def test_the_options_have_the_defaults_that_are_shown() -> None:
    table = PAGE.split("| option | default |")[1].split("\n\n")[0]
    shown = {}
    for line in table.splitlines()[2:]:
        names, defaults, _ = (cell.strip() for cell in line.strip("|").split("|"))
        values = [value.strip("` ") for value in defaults.split(",")]
        shown |= dict(zip(re.findall(r"`(\w+)`", names), values, strict=True))
    options = inspect.signature(WebSuite.make_env).parameters.values()
    defaults = {each.name: each.default for each in options if each.name != "self"}
    assert shown.keys() == defaults.keys()
    for name, default in defaults.items():
        if isinstance(default, float):
            assert float(shown[name]) == default, name
    start_s = Application.model_fields["start_s"].default
    assert f"| `start`, `start_s` | none, {start_s:g} |" in PAGE


def test_the_shown_function_is_one() -> None:
    [code] = blocks("python")
    [function] = [node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    assert [argument.arg for argument in function.args.args] == ["episode"]


@pytest.fixture
def env(tmp_path: Path) -> Iterator[WebEnv]:
    """Return an environment with the shown login."""
    try:
        find_chromium()
    except MissingPartError as missing:
        pytest.skip(str(missing))
    login = blocks("toml")[2]
    (tmp_path / "server.py").write_text(SERVER, encoding="utf-8")
    path = tmp_path / "login.toml"
    path.write_text(
        'url = "http://127.0.0.1:{port}/"\nstart = ["python3", "server.py", "{port}"]\n'
        f'[[tasks]]\nid = "greet"\ninstruction = "greet"\n{login}'
        'check = [{ script = "document.body.textContent", equals = "hello" }]\n',
        encoding="utf-8",
    )
    instance = WebSuite(path).make_env()
    yield instance
    instance.close()


def test_the_shown_login_is_done_for_each_episode(env: WebEnv) -> None:
    for seed in range(2):
        env.reset(seed=seed, options={"task": "login/greet"})
        assert env.evaluate().outcome == "pass"
        assert env.gui.ask("document.cookie") == "", "the page's scripts do not see it"
