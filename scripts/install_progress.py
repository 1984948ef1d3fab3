"""pip's output on stdin, as a line of progress every few seconds: for logs, where pip draws no bars.

    pip install ... | python scripts/install_progress.py FOLDER TOTAL

FOLDER is the site-packages that pip fills, TOTAL the packages that it is to add. A package of 20 MB or
more is named when its download begins; pip's errors pass through.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path

EVERY_S = 10.0
LARGE_MB = 20.0

_FETCHED = re.compile(
    r"\s*(?:Downloading|Using cached|Processing)\s+(?:\S*/)?([A-Za-z0-9_.]+?)-\d\S*(?:\s+\(([\d.]+) ([kMG])B\))?"
)
_MEGABYTES = {"k": 1e-3, "M": 1.0, "G": 1e3, None: 0.0}


class Progress:
    """A counter of what pip reports; `text` describes the present state."""

    def __init__(self, folder: Path, total: int) -> None:
        self._folder = folder
        self._total = total
        self._fetched: set[str] = set()
        self._megabytes = 0.0
        self._installing = False
        self._before = self._installed_packages()

    def read(self, line: str) -> str:
        """Read one line of pip; return the text to print at once, usually none."""
        if line.startswith("ERROR"):
            return line
        if line.startswith("Installing collected packages"):
            self._installing = True
            return self.text()
        match = _FETCHED.match(line)
        if match is None or ".metadata" in line:
            return ""
        megabytes = float(match[2] or 0) * _MEGABYTES[match[3]]
        self._fetched.add(match[1].lower())
        self._megabytes += megabytes
        return f"    fetching {match[1]}, {megabytes:.0f} MB" if megabytes >= LARGE_MB else ""

    def text(self) -> str:
        """Return the number of packages fetched, or installed."""
        if self._installing:
            installed = min(max(0, self._installed_packages() - self._before), self._total)
            return f"    installed {installed} of {self._all()}"
        size = f", {self._megabytes:.0f} MB" if self._megabytes >= 1 else ""
        return f"    fetched {len(self._fetched)} of {self._all()}{size}"

    def _all(self) -> str:
        return "1 package" if self._total == 1 else f"about {self._total} packages"

    def _installed_packages(self) -> int:
        return len(list(self._folder.glob("*.dist-info")))


def main() -> None:
    """Read stdin to its end; write a line where something has changed, each `EVERY_S` at most."""
    progress = Progress(Path(sys.argv[1]), int(sys.argv[2]))
    is_over = threading.Event()

    def report() -> None:
        last = progress.text()
        while not is_over.wait(EVERY_S):
            if (now := progress.text()) != last:
                print(now, flush=True)
                last = now

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    began = time.monotonic()
    for line in sys.stdin:
        if line_to_show := progress.read(line.rstrip("\n")):
            print(line_to_show, flush=True)
    is_over.set()
    reporter.join()
    print(f"{progress.text()}, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
