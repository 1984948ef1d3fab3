"""Text files as people and other programs write them.

read_text    the text of a file, in the encoding that its first bytes show
lines_of     the lines of a file one by one, without the whole file in memory
why          the reason why a file could not be read, in words, and the fix
read_toml    a TOML file as a pydantic model

An editor on Windows begins a file with a byte order mark, a shell there writes UTF-16, and lines end with
CR LF.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from bus.errors import TaskError, cure_of
from envs.contract.options import first_problem

M = TypeVar("M", bound=BaseModel)


def read_text(path: Path) -> str:
    """Return the text of a file; its lines end with LF only.

    Raises OSError, and UnicodeDecodeError if the text is neither UTF-8, UTF-16 nor UTF-32.
    """
    return decoded(path.read_bytes())


def decoded(content: bytes) -> str:
    """Return the text of a file's bytes. Raises UnicodeDecodeError as `read_text` does."""
    # The codecs that end in -sig count the place of an error from behind the byte order mark.
    encoding = json.detect_encoding(content).removesuffix("-sig")
    text = content.decode(encoding).removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a file with their line ends.

    Raises OSError and UnicodeDecodeError as `read_text` does.
    """
    with path.open("rb") as file:
        encoding = json.detect_encoding(file.read(4))
    try:
        with path.open(encoding=encoding) as lines:
            yield from lines
    except UnicodeDecodeError:
        # This error counts the place within a block that was read. The error of read_text counts it within
        # the file.
        read_text(path)
        raise


def why(error: Exception, fix: str) -> str:
    """Return the reason why a JSON file cannot be read, and the fix.

    Both are the end of a sentence that begins with the name of the file. `fix` is the fix for a file that is
    missing or whose text is wrong.
    """
    match error:
        case OSError():
            return f"cannot be read: {error.strerror or error}; {cure_of(error, fix)}"
        case UnicodeDecodeError():
            return f"is not {error.encoding.upper()} at byte {error.start}; save it as UTF-8"
        case json.JSONDecodeError():
            return f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}; {fix}"
        case RecursionError():
            return f"is nested too deeply; {fix}"
    return f"cannot be read: {error}; {fix}"


def read_toml(path: Path, model: type[M]) -> M:
    """Return a TOML file as `model`. Raises TaskError, which names the file and the wrong place in it."""
    try:
        return model.model_validate(tomllib.loads(read_text(path)))
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: no TOML: {error}") from None
    except ValidationError as error:
        raise TaskError(f"{path}: {first_problem(error)}") from None
