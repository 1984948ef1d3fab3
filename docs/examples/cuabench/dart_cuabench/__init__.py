"""A suite in a separate package: cua-bench's tasks, played on its HTTP workers.

suite     CuabenchSuite, which makes an environment for each slot
tasks     reads the file that names the tasks
env       CuabenchEnv, which plays one task at a time on one worker
actions   writes dart's actions as a worker's actions
workers   gives each worker to one slot
http      a client of JSON over HTTP, with a deadline and a bound on each reply

The routes and actions are defined in `cua_bench/workers/worker_server.py` (github.com/trycua/cua,
libs/cua-bench). docs/environments/cua-bench.md describes the behaviour of a worker.
"""

from dart_cuabench.suite import CuabenchSuite

__all__ = ["CuabenchSuite"]
