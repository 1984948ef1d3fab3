"""Text files as other programs write them: byte order marks, UTF-16, CR LF."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest

from envs.tools.textfiles import lines_of, read_text, why

TEXT = 'name = "Zoë"\n\n[run]\nseed = 1\n'
ENCODINGS = {
    "utf-8": TEXT.encode(),
    "a byte order mark": codecs.BOM_UTF8 + TEXT.encode(),
    "utf-16": TEXT.encode("utf-16"),
    "utf-16 big-endian": codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
    "utf-32": TEXT.encode("utf-32"),
    "CR LF": TEXT.replace("\n", "\r\n").encode(),
    "CR": TEXT.replace("\n", "\r").encode(),
}


@pytest.mark.parametrize("content", ENCODINGS.values(), ids=ENCODINGS)
def test_a_text_is_the_same_in_every_encoding(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert read_text(path) == TEXT
    assert list(lines_of(path)) == TEXT.splitlines(keepends=True)


def test_separators_within_a_line_end_no_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    line = '{"text": "a\u2028b\u0085c"}\n'
    path.write_text(line, encoding="utf-8")
    assert read_text(path).split("\n") == [line[:-1], ""]


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_the_byte_that_is_wrong_is_counted_from_the_files_beginning(
    mark: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(mark + b"[1]\n" * 5000 + b"\xff")
    for read in (read_text, lambda path: list(lines_of(path))):
        with pytest.raises(UnicodeDecodeError) as wrong:
            read(path)
        assert wrong.value.start == len(mark) + 20_000


def test_why_a_file_cannot_be_read_is_told_with_its_own_cure(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes('{"a": "é"}'.encode("latin-1"))
    with pytest.raises(UnicodeDecodeError) as latin:
        read_text(path)
    assert why(latin.value, "mend it") == "is not UTF-8 at byte 7; save it as UTF-8"
    path.write_bytes("[1]".encode("utf-16") + b"\x00")
    with pytest.raises(UnicodeDecodeError) as cut:
        read_text(path)
    assert why(cut.value, "mend it") == "is not UTF-16-LE at byte 8; save it as UTF-8"
    with pytest.raises(json.JSONDecodeError) as broken:
        json.loads("[1,\n 2,]")
    assert why(broken.value, "mend it").endswith("at line 2, column 4; mend it")
    denied = PermissionError(13, "Permission denied")
    message = "cannot be read: Permission denied; give this user the right to it"
    assert why(denied, "mend it") == message
