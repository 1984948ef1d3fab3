"""A mistake in FILE.toml is one line with the task, the key and the fix, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus.errors import TaskError
from envs.contract.registry import load_suite
from envs.suites.web.file import read_file

BOARD = Path(__file__).parent / "board" / "board.toml"

FILE = """
url = "http://127.0.0.1:{port}/?sid={session}"
start = ["python", "server.py", "{port}"]
state = { get = "/state?sid={session}" }

[[tasks]]
id = "move"
instruction = "Move {card}"
draw = { card = ["a", "b"], number = { integer = [1, 9] } }
setup = [{ post = "/state", json = "@start.json" }]
check = [{ path = "cards[title={card}].list", equals = "Done" }]
unchanged = ["users"]
solution = [{ click = ".card", text = "{card}" }, { keys = "ctrl+a" }]
"""

MISTAKES = [
    ("[[tasks]]", "[[task]]", "the file: 'task' is no key; did you mean 'tasks'?"),
    ("state =", "sate =", "the file: 'sate' is no key; did you mean 'state'?"),
    ("[[tasks]]", "dialogs = 'shown'\n[[tasks]]", "the file: dialogs: must be 'accept' or 'dismiss', got 'shown'"),
    ("[[tasks]]", "size = [10, 10]\n[[tasks]]", "the file: size: must be 100x100 to 4096x4096, got 10x10"),
    ("[[tasks]]", "clock = 'noon'\n[[tasks]]", "the file: clock: must be a time such as 2026-03-02T09:00:00Z, got 'noon'"),
    ("[[tasks]]", "hosts = ['http://a.b/']\n[[tasks]]", "the file: hosts: must be names such as cdn.example.com or 127.0.0.1:8000, got 'http://a.b/'"),
    ("http://127", "127", "the file: url: must be an address such as http://127.0.0.1:5173/, got '127.0.0.1:{port}/?sid={session}'"),
    ("{port}/", "80/", "the file: start needs {port} in url: each environment starts a server of its own at a port of its own"),
    ('start = ["python", "server.py", "{port}"]\n', "", "the file: url has {port}, the port of a server that dart starts; add start = [...]"),
    ("?sid={session}\"\nstart", "?sid={sesion}\"\nstart", "url: {sesion} is nothing that is drawn; did you mean 'session'?; there is port, seed, session"),
    ("127.0.0.1:{port}", "[::1]:{port}", "the file: url: must have a name or an IPv4 address such as 127.0.0.1, got 'http://[::1]:{port}/?sid={session}'"),
    ('{ integer = [1, 9] }', '{ sample = [["a"], 2] }', "task 'move': draw.number: sample of [['a'], 2]: Sample larger than population or is negative"),
    ('{ integer = [1, 9] }', '{ choice = "{later}" }, later = ["x"]', "task 'move': draw.number names later, which must come before it"),
    ('{ post = "/state", json = "@start.json" }', '{ python = "onw.py:go" }', "task 'move': there is no file {folder}/onw.py; did you mean 'own.py'?"),
    ('id = "move"\n', 'id = "move"\nuploads = ["none.txt"]\n', "task 'move': there is no file {folder}/none.txt"),
    ('id = "move"\n', "", "tasks[0]: id is missing"),
    ('instruction = "Move {card}"\n', "", "task 'move': instruction is missing"),
    ("Move {card}", "Move {cards}", "task 'move', instruction: {cards} is nothing that is drawn; did you mean 'card'?; there is card, folder, number, port, seed, session"),
    ("title={card}", "title={crd}", "task 'move', check[0].path: {crd} is nothing that is drawn; did you mean 'card'?; there is card, folder, number, port, seed, session"),
    ('["a", "b"]', "[]", "task 'move': draw: card is an empty list; name what to choose from"),
    ("{ integer =", "{ intger =", "task 'move': draw: number must be a list to choose from, or a table with one of choice, sample, integer, integers, sum, product, max, min, sorted, number, text, repeat, value; did you mean 'integer'?"),
    ("draw = {", "draw = { seed = [1],", "task 'move': draw: seed is a name that every text has already; choose another"),
    ('{ post = "/state"', '{ pots = "/state"', "task 'move', setup[0]: 'pots' is no key; did you mean 'post'?"),
    ("@start.json", "@strat.json", "@strat.json: {folder}/strat.json cannot be read: No such file or directory"),
    ("@start.json", "@bad.json", "@bad.json: {folder}/bad.json is not JSON: Expecting value at line 1, column 7"),
    ('{ post = "/state", json', '{ path = "x", post = "/state", json', "task 'move', setup[0]: path is for checks"),
    ('{ post = "/state", json', '{ get = "/x", post = "/state", json', "task 'move', setup[0]: has get and post; split it into one entry for each"),
    ('equals = "Done"', 'equls = "Done"', "task 'move', check[0]: 'equls' is no key; did you mean 'equals'?"),
    (', equals = "Done"', "", "task 'move', check[0]: says nothing of its value; add one of equals, contains, lacks, matches, at_least, at_most, length, exists, status"),
    ('path = "cards[title={card}].list", equals', "equals", "task 'move', check[0]: has nothing to check: add path (of the file's state), get, post, put, patch, delete, script, python or read"),
    ("cards[title={card}].list", "cards[title={card}.list", "task 'move', check[0]: path: 'cards[title={card}.list' is no path: want a name at character 6, as in cards[title=Milk].list or users[0].name"),
    ('equals = "Done"', 'matches = "("', "task 'move', check[0]: matches: '(' is no regular expression: missing ), unterminated subpattern at position 0"),
    ('equals = "Done"', 'equals = "Done", weight = 0', "task 'move', check[0]: weight: must be greater than 0, got 0"),
    ('equals = "Done"', 'equals = "Done", status = 200', "task 'move', check[0]: status stands alone beside a request"),
    ('{ path = "cards[title={card}].list", equals = "Done" }', '{ any = [{ path = "x", exist = true }] }', "task 'move', check[0].any[0]: 'exist' is no key; did you mean 'exists'?"),
    ('{ path = "cards[title={card}].list", equals = "Done" }', '{ any = [{ path = "x", exists = true }], path = "y" }', "task 'move', check[0]: joins checks, and cannot have a condition beside them"),
    ('check = [{ path = "cards[title={card}].list", equals = "Done" }]\n', "", "task 'move': needs check, a list of conditions; or feasible = false"),
    ("state = { get = \"/state?sid={session}\" }", "", "task 'move': a check without a source reads the application's state; add state = { get = \"/address\" } at the top of the file"),
    ('unchanged = ["users"]', 'unchanged = ["!users"]', "task 'move': unchanged: names only exceptions; add what they are exceptions of, e.g. \".\""),
    ('unchanged = ["users"]', 'unchanged = "users"', "task 'move': unchanged: must be a valid list, got 'users'"),
    ('{ keys = "ctrl+a" }', '{ key = "ctrl+a" }', "task 'move', solution[1]: 'key' is no key; did you mean 'keys'?"),
    ('{ keys = "ctrl+a" }', '{ keys = "ctrl+a", click = "b" }', "task 'move', solution[1]: must have one of click, double_click, triple_click, right_click, hover, drag, choose, type, keys, goto, answer, wait, action; it has click and keys"),
    ('{ keys = "ctrl+a" }', '{ action = { kind = "click", x = 3 } }', "task 'move', solution[1]: action: click.y: is missing"),
    ('{ keys = "ctrl+a" }', '{ drag = "a" }', "task 'move', solution[1]: drag and to belong together"),
    ('{ click = ".card", text = "{card}" }', '{ answer = "x" }', "task 'move': an answer ends the episode, so it must be the last entry of the solution"),
    ('{ keys = "ctrl+a" }', '{ keys = 5 }', "task 'move', solution[1]: keys: must be a valid list, got 5"),
    ('draw = { card = ["a", "b"], number = { integer = [1, 9] } }', "draw = 5", "task 'move': draw: must be a valid dictionary, got 5"),
    ('draw = { card = ["a", "b"], number = { integer = [1, 9] } }', "draw = 'five'", "task 'move': draw: must be a table or a function module:name, got 'five'"),
    ("[[tasks]]", "size = 'big'\n[[tasks]]", "size must be WIDTHxHEIGHT such as 448x336, got 'big'"),
    ('["python", "server.py", "{port}"]', "'npm run'", "the file: start: must be a valid list, got 'npm run'"),
    ('id = "move"', 'id = "move"\nmax_steps = 0', "task 'move': max_steps: must be greater than or equal to 1, got 0"),
    ('id = "move"', 'id = "move"\nsplit = "test"', "task 'move': split: must be 'train' or 'heldout', got 'test'"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "error"), MISTAKES)
def test_a_mistake_is_one_line_with_its_place_and_the_fix(
    tmp_path: Path, old: str, new: str, error: str
) -> None:
    (tmp_path / "start.json").write_text("{}")
    (tmp_path / "own.py").touch()
    (tmp_path / "bad.json").write_text('{"a": }')
    path = tmp_path / "tasks.toml"
    assert old in FILE
    path.write_text(FILE.replace(old, new, 1))
    with pytest.raises(TaskError) as raised:
        load_suite(f"web:{path}")
    assert str(raised.value) == f"{path}: {error.replace('{folder}', str(tmp_path))}"


def test_a_file_that_is_missing_or_no_toml_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.toml"
    with pytest.raises(TaskError, match="cannot be read: No such file"):
        read_file(path)
    path.write_text("url = ")
    with pytest.raises(TaskError, match="no TOML: Invalid value"):
        read_file(path)


def test_two_tasks_of_one_id_are_refused(tmp_path: Path) -> None:
    (tmp_path / "start.json").write_text("{}")
    path = tmp_path / "tasks.toml"
    path.write_text(FILE + FILE[FILE.index("[[tasks]]") :])
    with pytest.raises(TaskError, match="two tasks have the id 'move'; give each its own"):
        read_file(path)


def test_tasks_of_a_file_are_a_suite() -> None:
    tasks = load_suite(f"web:{BOARD}").tasks
    task = tasks["board/move"]
    assert (task.suite, task.max_steps, task.tier, task.split) == ("web", 10, 1, "train")
    assert task.instruction == "Move the card {card} to the list {list}"


def test_a_task_has_another_digest_once_its_check_or_a_file_that_it_names_changes(
    tmp_path: Path,
) -> None:
    path, start = tmp_path / "tasks.toml", tmp_path / "start.json"

    def digest(text: str = FILE, body: str = "{}") -> str:
        path.write_text(text)
        start.write_text(body)
        file = read_file(path)
        return file.digest(file.application.tasks[0])

    base = digest()
    assert digest() == base
    assert digest(FILE.replace('"Done"', '"Doing"')) != base
    assert digest(FILE.replace("state?sid", "all?sid")) != base
    assert digest(body='{"cards": []}') != base
    assert digest(FILE + FILE[FILE.index("[[tasks]]") :].replace('"move"', '"other"')) == base


def test_a_body_may_have_a_file_in_it_and_a_text_that_begins_with_an_at_sign(
    tmp_path: Path,
) -> None:
    (tmp_path / "start.json").write_text('{"cards": [1]}')
    (tmp_path / "note.txt").write_text("a note")
    path = tmp_path / "tasks.toml"
    body = '{ state = "@start.json", note = "@note.txt", by = "@@start.json", at = "@ann" }'
    path.write_text(FILE.replace('"@start.json"', body))
    file = read_file(path)
    assert file.with_contents(file.application.tasks[0].setup[0].json_) == {
        "state": {"cards": [1]},
        "note": "a note",
        "by": "@start.json",
        "at": "@ann",
    }
