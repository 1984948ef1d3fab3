"""A suite in a package of its own: cua-bench's tasks, played on its HTTP workers.

suite     CuabenchSuite, and an environment for each slot
tasks     the file that names the tasks
env       plays one task at a time on one worker
actions   our actions as those of a worker
workers   one slot for each worker
http      JSON over HTTP, with a deadline and a bound on every reply

The routes and actions are those of `cua_bench/workers/worker_server.py` (github.com/trycua/cua,
libs/cua-bench). docs/environments/cua-bench.md has what a worker does that one should know.
"""

from dart_cuabench.suite import CuabenchSuite

__all__ = ["CuabenchSuite"]
