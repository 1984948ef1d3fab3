"""A process that starts another as vLLM does, by what it sends it, prints its id, and is killed."""

from __future__ import annotations

import multiprocessing
import os
import pydoc
import signal
import sys
import time


class Sent:
    """Pickled by name, as the class Parts is: the receiver imports its module, and vLLM with it."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pydoc.locate, ("dart_cli.engines.vllm.plugin.Parts",)


def live(parts: type, started: multiprocessing.synchronize.Event) -> None:
    assert parts.__name__ == "Parts"
    started.set()
    time.sleep(600)  # longer than the test waits for its end


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    child = context.Process(target=live, args=(Sent(), started))
    child.start()
    assert started.wait(300)
    sys.stdout.write(f"{child.pid}\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
