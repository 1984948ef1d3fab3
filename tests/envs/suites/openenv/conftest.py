"""Profiles of the tests' environments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

PROFILE = """
name = "square"
max_steps = 6

[observation]
screenshot = "screen"
encoding = "{encoding}"
{shape}
instruction = "goal"
failed = "failed"

[refused]
actions = ["click"]
cure = "start it with coordinates"

[actions]
click = {{ kind = "click", x = "$x", y = "$y" }}
type = {{ kind = "type", text = "$text" }}
wait = {{ kind = "wait" }}
scroll = [{{ kind = "move", x = "$x", y = "$y" }}, {{ kind = "wheel", x = "$dx", y = "$dy" }}]

[[tasks]]
id = "click"
"""

FAULTS = "reset step hang exit done null seven refuses blind".split()


@pytest.fixture(scope="session")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """profile("base64") -> the suite's name for a server that sends screens in that way."""

    @cache
    def write_profile(encoding: str) -> str:
        shape = 'shape = "shape"' if encoding == "flat" else ""
        text = PROFILE.format(encoding="list" if encoding == "flat" else encoding, shape=shape)
        for fault in FAULTS:
            text += f'\n[[tasks]]\nid = "{fault}"\nreset = {{ fault = "{fault}" }}\n'
        file = Path(tmp_path_factory.mktemp("profiles")) / f"{encoding}.toml"
        file.write_text(text)
        return f"openenv:{file}"

    return write_profile
