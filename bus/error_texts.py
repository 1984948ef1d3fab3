"""Parts of error texts that several packages share.

did_you_mean   the closest valid name, for an error about a wrong one
one_line       an error that the code of a user raised, with its line
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable


def did_you_mean(wrong: str, valid: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` with the closest of the `valid` names, or nothing if none is close."""
    close = difflib.get_close_matches(wrong, list(valid), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def one_line(error: BaseException) -> str:
    """Return an error in one line, with the line number of the code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    line = getattr(error, "lineno", None) or (frames[-1].lineno if frames else None)
    where = f" (line {line})" if line else ""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {' '.join(message.split())}{where}"
