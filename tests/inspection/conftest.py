"""One played run for all inspection tests, and a reader beside its writer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dart_cli.data.store.open import open_reader, open_store
from dart_cli.data.store.reader import Reader
from tests.data.parts import small_config
from tests.inspection.parts import PlayedRun


@pytest.fixture(scope="session")
def run_content(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedRun]:
    config = small_config(
        tmp_path_factory.mktemp("runs") / "run",
        pool_ratio=0.25,
        high_entropy=0.8,
        max_staleness=4,
    )
    with open_store(config.run.dir) as store:
        yield PlayedRun(config, store)


@pytest.fixture
def reader(run_content: PlayedRun) -> Iterator[Reader]:
    with open_reader(run_content.config.run.dir) as reader:
        yield reader
