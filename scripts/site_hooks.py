"""Corrects what mkdocs makes of our pages; mkdocs.yml names this file."""

from __future__ import annotations

import re


def on_page_content(html: str, **_: object) -> str:
    r"""Return the page with `|` for `\|` in code.

    In a cell of a table GitHub needs the backslash, and python-markdown shows it.
    """
    return re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace(r"\|", "|"), html)
