"""Terminals that are not UTF-8: what they cannot show ends no command."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.waiting import PATIENCE_S

PAGES = """
import os, sys
from dart_cli.cli.main import _command
from dart_cli.runtime.streams import take_streams

take_streams()

def walk(command, path):
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from walk(below, [*path, name])

command, pages = _command(), 0
for os.environ["COLUMNS"] in ("80", "40"):
    for path in walk(command, []):
        try:
            command([*path, "--help"], prog_name="dart")
        except SystemExit as end:
            assert not end.code, path
        pages += 1
print("za\\u017c\\xf3\\u0142\\u0107 \\ud800 \\udcff")
sys.stdout.flush()
sys.stderr.write(f"{pages} pages, \\u2026 \\ud800")
"""


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({"PYTHONIOENCODING": "latin-1"}, b"za?\xf3?? ? ?"),
        ({"PYTHONIOENCODING": "ascii"}, b"za???? ? ?"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, b"za???? ? ?"),
        ({"LC_ALL": "C"}, "zażółć \\ud800 \\udcff".encode()),
    ],
    ids=str,
)
def test_every_help_page_is_shown_in_any_encoding(variables: dict[str, str], shown: bytes) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LC_")}
    done = subprocess.run(
        [sys.executable, "-c", PAGES],
        env={**clean, "PYTHONUTF8": "", **variables},
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    pages, _, rest = done.stderr.partition(b" pages, ")
    assert int(pages) > 60
    assert rest.endswith(b" \\ud800")
    assert done.stdout.splitlines()[-1] == shown
