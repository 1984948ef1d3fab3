"""Text files as people and other programs write them.

read_text    the text of a file, in the encoding that its first bytes show
lines_of     the same line by line, without holding the whole
why          why a file could not be read, in words

An editor on Windows begins a file with a byte order mark, a shell there writes UTF-16, and lines end with CR LF.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from bus.errors import cure_of


def read_text(path: Path) -> str:
    """Return the text of a file, with lines that end with LF alone.

    Raises OSError, or UnicodeDecodeError for what is neither UTF-8, UTF-16 nor UTF-32.
    """
    return decoded(path.read_bytes())


def decoded(content: bytes) -> str:
    """Return the text of a file's bytes. Raises UnicodeDecodeError as `read_text` does."""
    encoding = json.detect_encoding(content).removesuffix(
        "-sig"
    )  # whose errors count from the mark
    text = content.decode(encoding).removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a file with their ends. Raises OSError, or UnicodeDecodeError as `read_text` does."""
    with path.open("rb") as file:
        encoding = json.detect_encoding(file.read(4))
    try:
        with path.open(encoding=encoding) as lines:
            yield from lines
    except UnicodeDecodeError:
        read_text(path)  # raises it with the place in the file; this one has that in a part of it
        raise


def why(error: Exception, cure: str) -> str:
    """Return why a file of JSON cannot be read and its cure, as the end of a sentence that begins with its name.

    `cure` is that of a file whose text is wrong, or that is not there.
    """
    match error:
        case OSError():
            return f"cannot be read: {error.strerror or error}; {cure_of(error, cure)}"
        case UnicodeDecodeError():
            return f"is not {error.encoding.upper()} at byte {error.start}; save it as UTF-8"
        case json.JSONDecodeError():
            return f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}; {cure}"
        case RecursionError():
            return f"is nested too deeply; {cure}"
    return f"cannot be read: {error}; {cure}"
