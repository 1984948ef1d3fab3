"""A process that starts another as vLLM does, by what it sends it, tells its id, and is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time

from dart_cli.engines.vllm.plugin import Parts


def live(parts: type, told: multiprocessing.synchronize.Event) -> None:
    told.set()
    time.sleep(600)  # longer than the test waits for its end


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    told = context.Event()
    child = context.Process(target=live, args=(Parts, told))
    child.start()
    assert told.wait(300)
    sys.stdout.write(f"{child.pid}\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
