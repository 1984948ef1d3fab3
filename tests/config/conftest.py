"""Places that configurations with a mistake name."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Files and folders that the cases name."""
    made = {name: tmp_path / name for name in ("folder", "llama", "bare")}
    for path in made.values():
        path.mkdir()
    (made["llama"] / "config.json").write_text('{"model_type": "llama"}')
    (made["bare"] / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    made |= {"file": tmp_path / "file.py", "broken": tmp_path / "broken.py"}
    made["file"].write_text("x = 1\n")
    made["broken"].write_text("import does not parse\n")
    return {name: str(path) for name, path in made.items()}
