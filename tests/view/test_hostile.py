"""Whatever a model, an environment or a suite writes changes nothing in a page but its text."""

from __future__ import annotations

import base64
import io
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dart_cli.data.store.open import open_reader, open_store
from dart_cli.view.server import write_file
from dart_cli.view.site import stylesheet
from envs.contract.base import Task
from envs.contract.blobs import content_hash
from tests.data.parts import ask_lease, make_ledger, small_config, trajectory_end
from tests.view.parts import Bones, Server, play_shown, png, serving, shown_step
from tests.waiting import PATIENCE_S

HOSTILE = (
    "\"'><script>document.title='taken'</script><img src=x onerror=alert(1)>"
    "</pre></svg></style><svg onload=alert(2)><a href='javascript:alert(3)'>{{ 7 * 7 }}"
    "{% raw %}<!--<iframe src='http://evil.example'>&lt;b&gt;\u202e\u0000]]>"
)
BENIGN = "what a model says"


def play_words(run_dir: Path, word: str) -> str:
    """A run in which everything that others write is `word`; the id of its trajectory."""
    config = small_config(run_dir)
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        (run_dir / "notes.md").write_text(word, encoding="utf-8")
        for slot in range(4):
            lease = ask_lease(ledger, slot, worker=word)
            for step, text in enumerate((f"Thought: {word}\nAction: {word}", word)):
                record = shown_step(
                    lease.trajectory_id,
                    step,
                    text=text,
                    error=word if step else "",
                    action=None if step else {"kind": "type", "text": word},
                    worker=word,
                )
                assert ledger.step(record).accepted
            end = trajectory_end(lease.trajectory_id, 2, "fail" if slot else "pass")
            ledger.end(end.model_copy(update={"reason": word, "screenshot": png()}))
        group = store.groups()[0]
        task = Task(id=group.task_id, suite=group.suite, instruction=word, max_steps=3)
        store.begin_run(3, config.model_dump_json(), [task])
        return store.trajectories()[0].id


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    with ExitStack() as stack:
        found = {}
        for name, word in (("hostile", HOSTILE), ("benign", BENIGN)):
            run_dir = tmp_path_factory.mktemp(name) / "run"
            play_words(run_dir, word)
            found[name] = stack.enter_context(serving(run_dir))
        yield found


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/tasks",
        "/tasks/mini/click",
        "/groups",
        "/groups/g000001",
        "/trajectories",
        "/trajectories/g000001-00",
        "/trajectories/g000001-01",
    ],
)
def test_hostile_text_changes_nothing_but_words(path: str, servers: dict[str, Server]) -> None:
    hostile, benign = (Bones.of(servers[name].page(path)) for name in ("hostile", "benign"))
    assert hostile.elements == benign.elements
    assert not {tag for tag, _ in hostile.elements} & {"script", "iframe", "object", "embed"}
    assert not [name for _, names in hostile.elements for name in names if name.startswith("on")]
    assert not [name for _, names in hostile.elements for name in names if name == "style"]
    assert all(re.match(r"[/#?]", link) or not link for link in hostile.links)
    if path == "/trajectories/g000001-00":
        assert HOSTILE.replace("\u0000", "\ufffd").split("<!--")[0] in "".join(hostile.words)


def test_a_hostile_address_is_only_text_on_the_page_that_refuses_it(
    servers: dict[str, Server],
) -> None:
    for path in ("/trajectories/%3Cscript%3Ealert(1)%3C%2Fscript%3E", "/%22%3E%3Cscript%3E"):
        answer = servers["hostile"].get(path)
        assert answer.status == 404
        assert "script" not in {tag for tag, _ in Bones.of(answer.text).elements}
    answer = servers["hostile"].get("/trajectories?task=%3Cscript%3E&page=1")
    assert answer.status == 400
    assert "script" not in {tag for tag, _ in Bones.of(answer.text).elements}


@pytest.mark.parametrize("of_trajectory", [True, False])
def test_an_exported_file_points_nowhere_and_runs_nothing(
    of_trajectory: bool, tmp_path: Path
) -> None:
    name = play_words(tmp_path / "run", HOSTILE)
    file = tmp_path / "page.html"
    size = write_file(tmp_path / "run", file, name if of_trajectory else "")
    page = file.read_text(encoding="utf-8")
    assert len(file.read_bytes()) == size
    assert not list(tmp_path.glob("*.tmp"))
    bones = Bones.of(page)
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in bones.links)
    assert any(link.startswith("data:") for link in bones.links) == of_trajectory
    tags = {tag for tag, _ in bones.elements}
    assert not tags & {"script", "link", "iframe", "form", "base", "object", "embed"}
    assert "Content-Security-Policy" in page
    assert "default-src &#39;none&#39;" in page
    assert not re.search(r"@import|url\(", stylesheet())


@pytest.mark.parametrize("encoding", ["WEBP", "JPEG"])
def test_an_exported_file_holds_screens_of_each_encoding(encoding: str, tmp_path: Path) -> None:
    into = io.BytesIO()
    Image.new("RGB", (64, 48), "teal").save(into, encoding)
    image = into.getvalue()
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        shown = {"screenshot": image, "image_hashes": [content_hash(image)]}
        name = play_shown(ledger, 0, **shown)
        store.commit()
    write_file(config.run.dir, tmp_path / "page.html", name)
    held = base64.b64encode(image).decode()
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"data:image/{encoding.lower()};base64,{held}" in page


# --- a real browser -------------------------------------------------------------------------

BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


def _browse(folder: Path, *arguments: str) -> bytes:
    assert CHROMIUM is not None
    return subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--force-device-scale-factor=1", f"--user-data-dir={folder / 'browser'}"),
            *arguments,
        ],
        capture_output=True,
        timeout=PATIENCE_S,
        check=True,
    ).stdout


@needs_chromium
def test_a_browser_shows_the_ring_where_the_click_was(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with open_store(config.run.dir) as store:
        ledger = make_ledger(config, store)
        lease = ask_lease(ledger, 0)
        image = png(400, 240, "#00ff00")
        action = {"kind": "click", "x": 300, "y": 60, "button": "left"}
        record = shown_step(
            lease.trajectory_id,
            0,
            screenshot=image,
            image_hashes=[content_hash(image)],
            action=action,
        )
        ledger.step(record)
        store.commit()
    write_file(config.run.dir, tmp_path / "page.html", lease.trajectory_id)
    shot = tmp_path / "shot.png"
    _browse(
        tmp_path, "--window-size=1000,900", f"--screenshot={shot}", f"file://{tmp_path}/page.html"
    )
    with Image.open(io.BytesIO(shot.read_bytes())) as opened:
        pixels = opened.convert("RGB")
    green = _box(pixels, (0, 255, 0))
    ring = _box(pixels, (255, 20, 147))
    width, height = green[2] - green[0], green[3] - green[1]
    assert width > 200
    assert ((ring[0] + ring[2]) / 2 - green[0]) / width == pytest.approx(300 / 400, abs=0.01)
    assert ((ring[1] + ring[3]) / 2 - green[1]) / height == pytest.approx(60 / 240, abs=0.01)


def _box(image: Image.Image, colour: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Where pixels of that colour are."""
    rows, columns = np.nonzero((np.asarray(image) == colour).all(axis=2))
    assert len(rows), colour
    return int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1


def test_the_hostile_run_is_whole(servers: dict[str, Server], tmp_path: Path) -> None:
    """What the tests above compare is really in the database."""
    name = play_words(tmp_path / "run", HOSTILE)
    with open_reader(tmp_path / "run") as reader:
        assert reader.steps(name)[1].text == HOSTILE
        assert HOSTILE in set(reader.instructions().values())
