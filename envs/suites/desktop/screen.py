"""The screen of a desktop: Xvfb's framebuffer, which is read from the file that Xvfb maps.

    Framebuffer      reads the present pixels
    settle           waits until the screen has settled
    encode           encodes pixels as PNG or JPEG
    ticks, children  the processor time and the children of a process

Xvfb keeps its pixels in a file (-fbdir, in xwd's format). Reading them is a copy of memory, without a round
trip, an X library or a wait for a server that hangs. The pointer is in the picture.

`ticks` and `children` read /proc instead of calling psutil, whose children() reads all processes of the host:
they are called again and again while a screen settles.
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
    """The pixels of one Xvfb, as BGRX rows. Raises EnvError if its file has another format."""

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
    """Return the pixels as soon as nothing has changed for `quiet_s`, at the latest after `deadline_s`.

    Neither the pixels nor the value of `busy()` may change. The value changes while an application computes,
    which on a busy host may need longer than `quiet_s` for its next pixel.
    """
    began = since = time.monotonic()
    pixels, work = screen.read(), busy()
    while True:
        time.sleep(POLL_S)
        now, new_pixels, new_work = time.monotonic(), screen.read(), busy()
        if new_pixels != pixels or new_work != work:
            pixels, work, since = new_pixels, new_work, now
        if now - since >= quiet_s or now - began >= deadline_s:
            return pixels


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
    """Return a number that changes while a process computes or waits for a core: its processor ticks."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    waiting = fields[0] == b"R"
    return int(fields[11]) + int(fields[12]) + (time.monotonic_ns() if waiting else 0)


def children(pid: int) -> list[int]:
    """Return the processes that the first thread of a process started, such as GIMP's plug-ins."""
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []
