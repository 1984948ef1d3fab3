"""Values as text: of the command line, of a TOML file, of a message.

read_value   one value of the command line, read as TOML
to_toml      a value as TOML writes it
shown        a value in an error message
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")  # a key that needs no quotes


def read_value(text: str) -> Any:
    """Return the meaning of a value on the command line: read as TOML if it is TOML, else the text itself."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text.strip()


def to_toml(value: Any) -> str | None:
    """Return a value as TOML writes it; None for an unset key. Knows only the types that fields have."""
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        text = str(value)
        if "\n" in text and "'''" not in text and text.replace("\n", "").isprintable():
            return f"'''\n{text}'''"
        # TOML reads the escapes of JSON, which leaves DEL as it is.
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(to_toml(each) or '' for each in value)}]"
    pairs = [
        f"{key if _BARE.fullmatch(key) else json.dumps(key)} = {to_toml(each)}"
        for key, each in value.items()
        if each is not None
    ]
    return f"{{ {', '.join(pairs)} }}" if pairs else "{}"


def shown(value: object, *, quote: bool = True) -> str:
    """Return a value as TOML would show it, in one short line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not quote:
        text = " ".join(value.split())
    else:
        text = repr(str(value) if isinstance(value, Path) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
