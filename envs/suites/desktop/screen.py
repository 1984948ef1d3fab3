"""The screen: Xvfb's framebuffer, read from the file that it maps.

    Framebuffer   the pixels as they are now
    settle        wait until the screen has settled
    encode        pixels -> PNG or JPEG

Xvfb keeps its pixels in a file (-fbdir, in xwd's format). Reading them is a copy of memory: no round
trip, no X library, no waiting for a hanging server. The pointer is in the picture.

CPU time of processes (ticks, children) is read from /proc, not by psutil: its children() reads every process of
the host, and these are read again and again while a screen settles.
"""

from __future__ import annotations

import io
import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from bus.errors import EnvError
from envs.contract.options import ImageEncoding
from envs.contract.screenshots import SCREEN_JPEG_QUALITY

POLL_S = 0.015

_HEADER = struct.Struct(">25I")  # X11/XWDFile.h
_COLOUR_BYTES = 12
_BITS = 32


class Framebuffer:
    """The pixels of one Xvfb, BGRX rows. Raises EnvError if its file is not as expected."""

    def __init__(self, folder: Path) -> None:
        path = folder / "Xvfb_screen0"
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise EnvError(f"Xvfb keeps no pixels in {path}: {error}") from error
        header = _HEADER.unpack_from(self._map)
        self.width, self.height, bits, row = header[4], header[5], header[11], header[12]
        self._start = header[0] + _COLOUR_BYTES * header[19]
        self._end = self._start + row * self.height
        if bits != _BITS or row != self.width * _BITS // 8 or self._end > len(self._map):
            raise EnvError(f"Xvfb keeps {bits} bits a pixel and {row} bytes a row; 32 are needed")

    def read(self) -> bytes:
        """Return a copy of all pixels, [height x width x 4]."""
        return self._map[self._start : self._end]

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._map.close()


def settle(
    screen: Framebuffer, busy: Callable[[], int], quiet_s: float, deadline_s: float
) -> bytes:
    """Return the pixels once nothing has changed for `quiet_s`, or as they are after `deadline_s`.

    Neither the pixels nor `busy` may change; `busy` changes while an application computes: on a busy
    host it may need longer than `quiet_s` for its next pixel.
    """
    began = since = time.monotonic()
    seen, work = screen.read(), busy()
    while True:
        time.sleep(POLL_S)
        now, pixels, worked = time.monotonic(), screen.read(), busy()
        if pixels != seen or worked != work:
            seen, work, since = pixels, worked, now
        if now - since >= quiet_s or now - began >= deadline_s:
            return seen


def encode(pixels: bytes, width: int, height: int, encoding: ImageEncoding) -> bytes:
    """Return the pixels as an image file."""
    image = Image.frombuffer("RGB", (width, height), pixels, "raw", "BGRX", 0, 1)
    out = io.BytesIO()
    if encoding == "jpeg":
        image.save(out, "JPEG", quality=SCREEN_JPEG_QUALITY)
    else:
        image.save(out, "PNG", compress_level=1)
    return out.getvalue()


def ticks(pid: int) -> int:
    """Processor time of a process, hundredths of a second; one that waits for a core counts on."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    waiting = fields[0] == b"R"
    return int(fields[11]) + int(fields[12]) + (time.monotonic_ns() if waiting else 0)


def children(pid: int) -> list[int]:
    """Return the processes that the first thread of a process started, such as GIMP's plug-ins."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
