"""The pages of an exploration: every screen and step can be reached, and words of others stay words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from bus.errors import UserError
from dart_cli.explore.graph import ExploreSettings, Sight, open_graph, read_graph
from dart_cli.view.graph_pages import ACROSS, DOWN, places
from dart_cli.view.server import write_file
from dart_cli.view.site import ROWS
from envs.contract.elements import Element, ScreenState
from tests.explore.test_paths import edge, screen
from tests.view.parts import Bones, Server, png, serving
from tests.view.test_hostile import BENIGN, HOSTILE

COLOURS = ("teal", "navy", "olive", "maroon", "gray")
PLACES = ("0.0", "0.1", "0.2")


def explored(folder: Path, word: str, steps: int = 12) -> None:
    """Five screens of two applications, with all outcomes; everything that an application writes is `word`."""

    def sight(at: int, application: str, shade: int = 0) -> Sight:
        elements = tuple(
            Element("button", word, (10, 20 * nth, 110, 20 * nth + 16), ("click", "type"), place)
            for nth, place in enumerate(PLACES)
        )
        image = png(320, 200, COLOURS[at]) if not shade else png(320, 200, f"#0000{shade:02x}")
        state = ScreenState(f"{at}", word, word)
        return Sight(f"{application} {word}", state, elements, image, 320, 200, at == 4)

    with open_graph(folder, ExploreSettings(suite=word)) as graph:
        for application in ("a", "b"):
            here = sight(0, application)
            start = graph.add_start(word, 0, 0, here)
            key, shot = start.screen, start.screenshot
            for step in range(steps):
                at = (0, 1, 2, 2, 3, 1, 4)[step % 7]
                after = None if step == 5 else sight(at, application, step if at == 2 else 0)
                found = graph.add_edge(
                    episode=start.episode,
                    slot=0,
                    before=key,
                    shot_before=shot,
                    element=here.elements[step % 3],
                    action="type" if step % 4 == 1 else "click",
                    text=word,
                    after=after,
                    detail=word,
                )
                if after is None or after.has_ended:
                    continue
                assert found.after
                assert found.shot_after
                here, key, shot = after, found.after, found.shot_after


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, word in (("hostile", HOSTILE), ("benign", BENIGN)):
        found[name] = tmp_path_factory.mktemp(name) / "graph"
        explored(found[name], word.replace("\u0000", ""))
    return found


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Server]:
    with serving(folders["benign"]) as server:
        yield server


def test_every_link_leads_to_a_page_and_every_screen_is_linked(
    server: Server, folders: dict[str, Path]
) -> None:
    seen, waiting = set(), ["/"]
    while waiting:
        path = waiting.pop().partition("#")[0] or "/"
        if path in seen:
            continue
        seen.add(path)
        answer = server.get(path)
        assert answer.status == 200, path
        if answer.headers["content-type"].startswith("text/html"):
            waiting += [link for link in Bones.of(answer.text).links if not link.startswith("?")]
    with read_graph(folders["benign"]) as graph:
        screens = {f"/screens/{each.id}" for each in graph.screens()}
        shots = {each.shot_after for each in graph.edges()} - {None}
    assert screens | {"/", "/steps", "/merges", "/view.css"} <= seen
    assert {f"/screenshots/{each}" for each in shots} <= seen


def test_the_graph_page_has_the_numbers_of_the_graph(
    server: Server, folders: dict[str, Path]
) -> None:
    bones = Bones.of(server.page("/"))
    with read_graph(folders["benign"]) as graph:
        screens, edges, merges = graph.screens(), graph.edges(), graph.merges()
    still = sum(each.outcome == "none" for each in edges)
    for told in (
        f"screens {len(screens)}",
        f"steps {len(edges)}",
        f"no-ops {still} ({still / len(edges):.0%})",
        "errors 2",
        "episodes 2",
        f"merged pictures {len(merges)}",
    ):
        assert told in bones.text
    assert len(merges) > 0
    nodes = [each for each in bones.links if each.startswith("/screens/")]
    assert sorted(nodes) == sorted(f"/screens/{each.id}" for each in screens)


def test_the_page_of_a_screen_tells_its_steps_with_both_pictures_and_the_box(
    server: Server, folders: dict[str, Path]
) -> None:
    with read_graph(folders["benign"]) as graph:
        edges = graph.edges()
        start = graph.starts()[0].screen
        merged = {each.screen for each in graph.merges()}
    here = [each for each in edges if each.before == start]
    assert {"moved"} <= {each.outcome for each in here}
    page = server.page(f"/screens/{start}")
    for each in here:
        left, top, right, bottom = each.element.box
        box = f'class="mark" x="{left}" y="{top}" width="{right - left}" height="{bottom - top}"'
        assert box in page
        assert f"/screenshots/{each.shot_before}" in page
    assert "start" in Bones.of(page).text
    page = server.page(f"/screens/{next(iter(merged))}")
    assert "Pictures that counted as this screen" in page
    failed = next(each for each in edges if each.outcome == "error")
    page = Bones.of(server.page(f"/screens/{failed.before}"))
    assert "no screen after it" in page.text


def test_steps_are_filtered_and_paged(server: Server, folders: dict[str, Path]) -> None:
    with read_graph(folders["benign"]) as graph:
        edges = graph.edges()
    for outcome in ("moved", "none", "error"):
        count = sum(each.outcome == outcome for each in edges)
        assert f"of {count}" in Bones.of(server.page(f"/steps?outcome={outcome}")).text
    assert len(edges) < ROWS
    assert server.get("/steps?outcome=moving").status == 400
    assert "did you mean 'moved'" in Bones.of(server.get("/steps?outcome=move").text).text
    assert server.get("/steps?page=2").status == 400


@pytest.mark.parametrize(
    "path",
    [
        "/screens/none",
        "/screenshots/*",
        "/screenshots/..%2fgraph",
        "/small/graph.sqlite",
        f"/screenshots/{'0' * 32}",
        "/trajectories",
    ],
)
def test_nothing_else_of_the_folder_is_shown(server: Server, path: str) -> None:
    assert server.get(path).status == 404


def test_a_small_picture_is_smaller_and_an_unknown_screen_is_told(server: Server) -> None:
    page = server.page("/")
    [small, *_] = re.findall(r"/small/[0-9a-f]{32}", page)
    assert server.get(small).headers["content-type"] == "image/webp"
    assert server.get(small.replace("small", "screenshots")).headers["content-type"] == "image/png"


def test_hostile_words_make_the_same_elements(folders: dict[str, Path]) -> None:
    with serving(folders["hostile"]) as hostile, serving(folders["benign"]) as benign:
        with read_graph(folders["benign"]) as graph:
            keys = [each.id for each in graph.screens()]
        with read_graph(folders["hostile"]) as graph:
            others = [each.id for each in graph.screens()]
        paths = [("/", "/"), ("/steps", "/steps"), ("/merges", "/merges")]
        paths += [
            (f"/screens/{one}", f"/screens/{two}") for one, two in zip(keys, others, strict=True)
        ]
        for one, two in paths:
            first, second = Bones.of(benign.page(one)), Bones.of(hostile.page(two))
            assert first.elements == second.elements, one
            assert not any("javascript" in link for link in second.links)


def test_an_exported_graph_is_one_file_with_each_picture_once(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "graph.html"
    assert write_file(folders["hostile"], path) == path.stat().st_size
    page = path.read_text()
    bones = Bones.of(page)
    assert not {name for name, _ in bones.elements} & {"script", "iframe", "object", "link"}
    anchors = set(re.findall(r' id="([^"]+)"', page))
    for link in bones.links:
        assert link.startswith(("#", "data:image/")), link
        assert not link.startswith("#") or link[1:] in anchors, link
    pictures = [link for link in bones.links if link.startswith("data:")]
    assert len(pictures) == len(set(pictures)) > 4
    with read_graph(folders["hostile"]) as graph:
        assert {f"screen-{each.id}" for each in graph.screens()} <= anchors
    with pytest.raises(UserError, match="no trajectories"):
        write_file(folders["hostile"], path, "g000001-00")


@pytest.mark.parametrize("seed", range(4))
def test_screens_stand_in_the_column_of_their_depth_and_apart(seed: int) -> None:
    rng = Random(seed)
    screens = [replace(screen("s0"), depth=0)]
    moves = {}
    for at in range(1, 30):
        parent = rng.choice(screens)
        screens.append(replace(screen(f"s{at}"), depth=parent.depth + 1))
        moves[parent.id, f"s{at}"] = [edge(at, parent.id, "x", f"s{at}")]
    screens.sort(key=lambda each: each.depth)
    at, parents = places(screens, moves)
    assert len(set(at.values())) == len(at) == 30
    tops: dict[int, list[int]] = {}
    for each in screens:
        x, y = at[each.id]
        assert (x - 8) // ACROSS == each.depth
        assert each.id not in parents or y >= at[parents[each.id]][1]
        tops.setdefault(x, []).append(y)
    for column in tops.values():
        column.sort()
        assert all(b - a >= DOWN for a, b in pairwise(column))
    # Lines of the tree between the same two columns never cross.
    lines = [(at[parent], at[child]) for child, parent in parents.items()]
    for (a, b), (c, d) in ((one, two) for one in lines for two in lines):
        assert a[0] != c[0] or a[1] >= c[1] or b[1] < d[1]
