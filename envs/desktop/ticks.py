"""CPU time of processes, as Linux counts it.

    ticks      CPU time of a process
    children   the processes that a process started

Read from /proc, not by psutil: its children() reads every process of the host, and these are
read again and again while a screen settles.
"""

from __future__ import annotations

import time
from pathlib import Path


def ticks(pid: int) -> int:
    """Processor time of a process, hundredths of a second; one that waits for a core counts on."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    waiting = fields[0] == b"R"
    return int(fields[11]) + int(fields[12]) + (time.monotonic_ns() if waiting else 0)


def children(pid: int) -> list[int]:
    """Processes that the first thread of a process started, such as GIMP's plug-ins."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
