"""Places that configurations with a mistake name."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Files and folders that the cases name."""
    paths = {name: tmp_path / name for name in ("folder", "llama", "bare")}
    for path in paths.values():
        path.mkdir()
    (paths["llama"] / "config.json").write_text('{"model_type": "llama"}')
    bare = '{"model_type": "qwen2_5_vl", "vision_config": {}}'
    (paths["bare"] / "config.json").write_text(bare)
    paths |= {"file": tmp_path / "file.py", "broken": tmp_path / "broken.py"}
    paths["file"].write_text("x = 1\n")
    paths["broken"].write_text("import does not parse\n")
    return {name: str(path) for name, path in paths.items()}
