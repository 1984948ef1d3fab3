"""Workers in processes of their own, and a file of tasks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.examples.cuabench.worker_process import own_suite, worker

TASKS = """
env_path = "tasks/square"
max_steps = 6

[[tasks]]
count = 3

[[tasks]]
task_index = 3
split = "test"

"""

FAULTS = "full reset redirect image big hang exit reward".split()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A worker for all tests of a module: /reset begins anew."""
    with worker() as address:
        yield address


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four tasks, and one for each fault; named as a user names a suite of their own."""
    file = tmp_path_factory.mktemp("tasks") / "square.toml"
    faults = [f'[[tasks]]\nenv_path = "faults/{fault}"\n' for fault in FAULTS]
    file.write_text(TASKS + "\n".join(faults))
    return own_suite(file)
