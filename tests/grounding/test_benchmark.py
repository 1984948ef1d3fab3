"""`dart eval grounding`, end to end on a set that is drawn here."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bus.errors import EngineError, EngineGoneError, UserError
from dart_cli.cli.main import main
from dart_cli.grounding import GroundingOptions
from dart_cli.grounding import benchmark as verb
from dart_cli.grounding.benchmark import ANSWERS, MISSES, REPORT, run_grounding
from dart_cli.grounding.items import Answer, Box, Item, Picture
from dart_cli.grounding.scorers import answer_all
from dart_cli.policy.loader import load_policy, weight_tensors
from scripts.make_grounding_set import make_set
from scripts.small_models import build
from tests.grounding.sets import BOX, SETS, SIZE, read, write
from tests.stopping import signal_in
from tests.weights.sets import publish


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few screens that the tiny model knows."""
    out = tmp_path_factory.mktemp("made") / "set"
    make_set(out, ["mini"], {"test": 12})
    return out / "test"


class Pointer:
    """Answers without a model: points at `at`, or at nothing."""

    def __init__(self, at: tuple[float, float] | None = (50.0, 30.0)) -> None:
        self.at = at
        self.asked: list[str] = []
        self.fails_at = ""  # id of an item
        self.ends_at = ""  # likewise: the whole evaluation ends there
        self.hangs_at = ""

    async def answer(self, item: Item) -> Answer:
        if item.id == self.ends_at:
            raise RuntimeError("killed")
        if item.id == self.hangs_at:
            await asyncio.Event().wait()
        if item.id == self.fails_at:
            raise EngineError("the prompt is too long")
        self.asked.append(item.id)
        return Answer(id=item.id, points=[self.at], texts=["here"], refused=self.at is None)


@pytest.fixture
def pointer(monkeypatch: pytest.MonkeyPatch) -> Pointer:
    """In place of the model."""

    @asynccontextmanager
    async def loaded(*_: object) -> Any:
        yield None

    mine = Pointer()
    monkeypatch.setattr(verb, "loaded_model", loaded)
    monkeypatch.setattr(verb, "make_scorer", lambda *_: mine)
    return mine


def options(folder: Path, out: Path, **more: Any) -> GroundingOptions:
    return GroundingOptions(folder=folder, model="builtin:tiny", out=out, **more)


def test_the_tiny_model_hits_what_it_was_trained_to_hit(
    mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["eval", "grounding", str(mini), "--model", "builtin:tiny", "--out", str(out)]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--candidates", "3", "--json"])
    assert ended.value.code == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == json.loads((out / REPORT).read_text())
    assert told["n"] == told["items"] == 12
    assert told["hit_1"] >= 0.6 > 0.2 > told["chance"]
    assert told["hit_3"] >= told["hit_1"]
    assert told["no_answer"] == 0
    assert (told["action_parser"], told["coordinates"]) == ("compact", "thousandths")
    assert told["template"] == "{instruction}"
    assert told["max_pixels"] == 931840
    lines = [json.loads(line) for line in (out / ANSWERS).read_text().splitlines()]
    assert all(len(line["points"]) == len(line["texts"]) == 3 for line in lines)
    assert any(line["texts"][0] != line["texts"][1] for line in lines)


@pytest.mark.parametrize(
    ("family", "most", "seen"),
    [
        ("qwen2_vl", 8_000, (112, 56)),
        ("qwen2_5_vl", 8_000, (112, 56)),
        ("qwen3_vl", 80_000, (384, 192)),  # enlarged to its fewest pixels
    ],
)
def test_models_of_every_class_answer_at_the_size_that_is_asked_for(
    family: str,
    most: int,
    seen: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An untrained model: each item has an answer, and its settings say what it saw."""
    sizes = []
    make = verb.make_scorer

    def spied(model: Any, *rest: Any) -> Any:
        sizes.append(model.responder.policy.images.resized(*SIZE))
        return make(model, *rest)

    monkeypatch.setattr(verb, "make_scorer", spied)
    SETS["screenspot-pro"](tmp_path / "set")
    folder = build(family, tmp_path / "model")
    asked = GroundingOptions(
        folder=tmp_path / "set",
        model=str(folder),
        action_parser="point",
        out=tmp_path / "out",
        max_pixels=most,
        overrides=["rollout.max_tokens=4"],
    )
    report = run_grounding(asked)
    assert report is not None
    assert (report.overall.n, report.overall.unanswered) == (2, 0)
    told = json.loads((tmp_path / "out" / REPORT).read_text())
    assert (told["max_pixels"], told["max_tokens"]) == (most, 4)
    assert sizes == [seen]


def test_a_second_start_asks_only_for_what_is_missing(
    tmp_path: Path, pointer: Pointer, capsys: pytest.CaptureFixture[str]
) -> None:
    SETS["screenspot"](tmp_path / "set")
    out = tmp_path / "out"
    pointer.ends_at = "screenspot_web.json[0]"
    with pytest.raises(RuntimeError):
        run_grounding(options(tmp_path / "set", out, overrides=["rollout.max_batch=1"]))
    assert pointer.asked == ["screenspot_desktop.json[0]"]
    assert not (out / REPORT).exists()
    pointer.ends_at = ""
    first = run_grounding(options(tmp_path / "set", out))
    assert pointer.asked == ["screenspot_desktop.json[0]", "screenspot_web.json[0]"]
    assert first is not None
    assert first.overall.hits == 2
    assert run_grounding(options(tmp_path / "set", out)) == first
    assert len(pointer.asked) == 2
    text = capsys.readouterr().out
    assert "action parser compact, coordinates thousandths, greedy" in " ".join(text.split())
    assert "max_pixels 931840" in text
    with pytest.raises(UserError, match="candidates was 1 and is 3"):
        run_grounding(options(tmp_path / "set", out, candidates=3))
    run_grounding(options(tmp_path / "set", out, candidates=3, fresh=True))
    assert len(pointer.asked) == 4


def test_stopped_by_a_signal_it_tells_how_many_answers_are_kept(
    tmp_path: Path,
    pointer: Pointer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    SETS["screenspot"](tmp_path / "set")
    pointer.hangs_at = "screenspot_web.json[0]"
    signal_in(monkeypatch, f"the model to answer item {pointer.hangs_at}", signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        run_grounding(
            options(tmp_path / "set", tmp_path / "out", overrides=["rollout.max_batch=1"])
        )
    assert stopped.value.code == 143
    said = capsys.readouterr().err
    assert f"it had waited 0 s for the model to answer item {pointer.hangs_at}" in said
    assert f"1 of 2 answers are in {tmp_path}/out; the same command continues" in said


def test_an_item_without_an_answer_is_a_miss_now_and_asked_again_later(
    tmp_path: Path, pointer: Pointer, capsys: pytest.CaptureFixture[str]
) -> None:
    SETS["screenspot"](tmp_path / "set")
    pointer.fails_at = "screenspot_web.json[0]"
    report = run_grounding(options(tmp_path / "set", tmp_path / "out"))
    assert report is not None
    assert (report.overall.hits, report.overall.unanswered) == (1, 1)
    assert "the prompt is too long" in " ".join(capsys.readouterr().out.split())
    pointer.fails_at = ""
    again = run_grounding(options(tmp_path / "set", tmp_path / "out"))
    assert again is not None
    assert (again.overall.hits, again.overall.unanswered) == (2, 0)


def test_no_answer_at_all_is_an_error(tmp_path: Path, pointer: Pointer) -> None:
    SETS["screenspot"](tmp_path / "set")
    (tmp_path / "set" / "screenspot_web.json").unlink()
    pointer.fails_at = "screenspot_desktop.json[0]"
    with pytest.raises(EngineError, match=r"no item was answered.*too long"):
        run_grounding(options(tmp_path / "set", tmp_path / "out"))


def test_a_malformed_row_is_refused_before_anything_is_asked(
    tmp_path: Path, pointer: Pointer, capsys: pytest.CaptureFixture[str]
) -> None:
    SETS["screenspot"](tmp_path / "set")
    [row] = read(tmp_path / "set" / "screenspot_web.json")
    write(tmp_path / "set" / "screenspot_web.json", [row, {**row, "bbox": [1]}])
    arguments = ["eval", "grounding", str(tmp_path / "set"), "--model", "builtin:tiny"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "malformed row: screenspot_web.json[1]: bbox [1]: must have four numbers" in told
    assert "error: 1 of 3 rows are malformed" in told.splitlines()[-1]
    assert not (tmp_path / "out").exists()
    report = run_grounding(options(tmp_path / "set", tmp_path / "out", skip_malformed=True))
    assert report is not None
    assert report.overall.n == 2
    assert json.loads((tmp_path / "out" / REPORT).read_text())["malformed"] == 1


def test_the_page_shows_misses_and_escapes_what_is_not_ours(
    tmp_path: Path, pointer: Pointer
) -> None:
    SETS["screenspot"](tmp_path / "set")
    path = tmp_path / "set" / "screenspot_web.json"
    [row] = read(path)
    write(path, [{**row, "instruction": f"<script>{i}</script>"} for i in range(5)])
    pointer.at = (150.0, 90.0)
    run_grounding(options(tmp_path / "set", tmp_path / "out", misses=4))
    page = (tmp_path / "out" / MISSES).read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert page.count("<figure>") == 4
    assert "4 of 6 misses" in page
    assert page.count("data:image/jpeg;base64,") == 4
    assert not re.search(r"(src|href)=.https?:", page)


def test_a_limit_is_spread_over_the_set(tmp_path: Path, pointer: Pointer) -> None:
    SETS["screenspot"](tmp_path / "set")
    path = tmp_path / "set" / "screenspot_desktop.json"
    write(path, read(path) * 9)
    run_grounding(options(tmp_path / "set", tmp_path / "out", limit=5))
    assert sorted(pointer.asked) == [f"screenspot_desktop.json[{i}]" for i in (0, 2, 4, 6, 8)]
    whole = run_grounding(options(tmp_path / "set", tmp_path / "out"))
    assert whole is not None
    assert whole.overall.n == 10
    assert len(pointer.asked) == 10  # those of before are not asked again


def test_refusals_are_asked_for_and_told_apart(
    tmp_path: Path, pointer: Pointer, capsys: pytest.CaptureFixture[str]
) -> None:
    SETS["osworld-g"](tmp_path / "set")
    pointer.at = None
    report = run_grounding(options(tmp_path / "set", tmp_path / "out"))
    assert report is not None
    assert report.refusals is not None
    assert (report.refusals.refused, report.refusals.refused_others) == (1, 2)
    assert "refusals: 1 of 1 refused" in " ".join(capsys.readouterr().out.split())


def test_a_dry_run_tells_the_settings_and_keeps_nothing(
    mini: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_grounding(options(mini, tmp_path / "out", dry_run=True)) is None
    told = capsys.readouterr().out
    assert "coordinates:    thousandths" in told
    assert "nothing was asked" in told
    assert not (tmp_path / "out").exists()


async def test_an_engine_that_has_ended_ends_the_evaluation() -> None:
    class Gone:
        async def answer(self, item: Item) -> Answer:
            raise EngineGoneError("the engine ended")

    items = [Item(str(i), Picture(Path("a")), (200, 100), "x", Box(*BOX)) for i in range(4)]
    with pytest.raises(EngineGoneError):
        await answer_all(Gone(), items, 2, lambda _: None)


async def test_so_many_items_are_asked_at_once_and_no_more() -> None:
    running, most = 0, 0

    class Slow:
        async def answer(self, item: Item) -> Answer:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return Answer(id=item.id, points=[None])

    items = [Item(str(i), Picture(Path("a")), (200, 100), "x", Box(*BOX)) for i in range(20)]
    kept: list[str] = []
    assert await answer_all(Slow(), items, 3, lambda each: kept.append(each.id)) == {}
    assert most == 3
    assert sorted(kept, key=int) == [str(i) for i in range(20)]


def test_published_weights_answer_in_place_of_the_models_own(mini: Path, tmp_path: Path) -> None:
    """Weights of zero write something else than the model, and are another evaluation."""
    tensors = weight_tensors(load_policy("builtin:tiny").model)
    publish({name: value * 0 for name, value in tensors.items()}, tmp_path / "weights", 4)
    report = run_grounding(options(mini, tmp_path / "out", limit=3, weights=tmp_path / "weights"))
    assert report is not None
    assert (report.overall.n, report.overall.hits) == (3, 0)
    told = json.loads((tmp_path / "out" / REPORT).read_text())
    assert told["weights"].startswith("v4 ")
    with pytest.raises(UserError, match=r"weights was 'v4 .*' and is ''"):
        run_grounding(options(mini, tmp_path / "out", limit=3))
    with pytest.raises(UserError, match=r"--weights .*no such directory"):
        run_grounding(options(mini, tmp_path / "out", weights=tmp_path / "nowhere"))
