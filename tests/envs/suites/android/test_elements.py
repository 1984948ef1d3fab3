"""What an explorer is told of a device: its view tree, as `uiautomator dump` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from PIL import Image

from bus.errors import EnvError
from envs.contract.actions import Wait
from envs.contract.elements import Explorable, elements_of, state_of
from envs.contract.registry import make_env
from envs.suites.android.adb import nodes_of
from envs.suites.android.env import AndroidEnv
from tests.envs.suites.android.fake_adb import install

SIZE = (1080, 2220)
FLAGS = ("clickable", "checkable", "scrollable", "selected", "long-clickable", "password")


def view(kind: str, bounds: str, *inside: str, on: str = "", **values: str) -> str:
    flags = {name: str(name in on.split()).lower() for name in FLAGS} | {"enabled": "true"}
    attributes = flags | {name.replace("_", "-"): value for name, value in values.items()}
    attributes = " ".join(f'{name}="{value}"' for name, value in attributes.items())
    start = f'<node index="0" package="com.android.settings" class="{kind}" bounds="{bounds}" '
    return f"{start}{attributes}>{''.join(inside)}</node>"


def row(number: int, title: str) -> str:
    top = 400 + 200 * number
    text = view("android.widget.TextView", f"[200,{top}][900,{top + 60}]", text=title)
    box = f"[0,{top}][1080,{top + 200}]"
    return view(
        "android.widget.LinearLayout", box, view("android.view.View", box, text), on="clickable"
    )


def dump(*titles: str, wifi: str = "true") -> str:
    rows = [row(number, title) for number, title in enumerate(titles)]
    switch = view(
        "android.widget.Switch",
        "[900,200][1060,300]",
        on="clickable checkable",
        content_desc="Wi-Fi",
    )
    search = view(
        "android.widget.EditText",
        "[40,100][800,180]",
        on="clickable",
        text="",
        hint="Search settings",
    )
    off = view(
        "android.widget.Button", "[40,300][200,380]", text="Reset", enabled=wifi, on="clickable"
    )
    views = view(
        "androidx.recyclerview.widget.RecyclerView", "[0,400][1080,2100]", *rows, on="scrollable"
    )
    root = view("android.widget.FrameLayout", "[0,0][1080,2220]", search, switch, off, views)
    return f"<?xml version='1.0' encoding='UTF-8' standalone='yes' ?><hierarchy rotation=\"0\">{root}</hierarchy>"


def tree(text: str) -> ET.Element:
    return ET.fromstring(text)


def test_views_are_elements_with_their_names_and_actions() -> None:
    elements = {e.name: e for e in elements_of(nodes_of(tree(dump("Network", "Sound")), *SIZE))}
    assert elements["Search settings"].actions == ("click", "type")
    assert elements["Wi-Fi"].role == "Switch"
    assert elements["Network"].role == "LinearLayout", "a row is called what is written in it"
    assert elements["Network"].box == (0, 400, 1080, 600)
    assert elements[""].actions == ("scroll",)
    for element in elements.values():
        left, top, right, bottom = element.box
        x, y = element.centre
        assert 0 <= left <= x < right <= SIZE[0]
        assert 0 <= top <= y < bottom <= SIZE[1]


def test_rows_beyond_the_list_are_cut_off() -> None:
    titles = [f"Row {number}" for number in range(10)]
    boxes = {e.name: e.box for e in elements_of(nodes_of(tree(dump(*titles)), *SIZE))}
    assert boxes["Row 8"] == (0, 2000, 1080, 2100)
    assert "Row 9" not in boxes


def test_texts_and_the_length_of_a_list_are_no_other_state_and_a_disabled_view_is() -> None:
    def state(text: str) -> str:
        return state_of("settings", nodes_of(tree(text), *SIZE)).id

    assert state(dump("Network", "Sound")) == state(dump("Netz", "Ton", "Bild"))
    assert state(dump("Network")) != state(dump("Network", wifi="false"))
    assert state(dump("Network")) != state(dump())


@pytest.fixture
def device(tmp_path: Path) -> Path:
    folder = tmp_path / "device"
    adb = install(folder)
    assert adb == str(folder / "adb")
    Image.new("RGB", (90, 160), "navy").save(folder / "screen", "PNG")
    programs = {
        "uiautomator": 'cat "$DEVICE/views"; echo "UI hierchary dumped to: $2"',
        "dumpsys": 'cat "$DEVICE/focus"',
    }
    for name, script in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "views").write_text(dump("Network"))
    window = "Window{2f1 u0 com.android.settings/com.android.settings.Settings}"
    (folder / "focus").write_text(f"  mCurrentFocus={window}\n")
    return folder


@pytest.fixture
def env(device: Path) -> Iterator[AndroidEnv]:
    env = make_env("android", adb=str(device / "adb"), serial="R58M", pause_s=0, deadline_s=20)
    assert isinstance(env, AndroidEnv)
    env.reset(seed=1, options={"task": "android/airplane"})
    yield env
    env.close()


def test_a_device_is_asked_once_for_each_screen(env: AndroidEnv, device: Path) -> None:
    assert isinstance(env, Explorable)
    before = env.state()
    assert before.route == "com.android.settings/.Settings"
    (field,) = env.elements()
    assert (field.name, field.box) == ("Search settings", (40, 100, 90, 160)), "of a small screen"
    (device / "focus").write_text("  mCurrentFocus=null\n")
    assert env.state() == before, "read once"
    env.step(Wait(seconds=0))
    assert env.state().route == "com.android.settings", "the views' package"


def test_a_screen_that_is_never_still_is_an_error_that_says_so(
    env: AndroidEnv, device: Path
) -> None:
    (device / "views").write_text("ERROR: could not get idle state.")
    with pytest.raises(EnvError, match="could not get idle state"):
        env.elements()
    (device / "views").write_text('<!DOCTYPE a [<!ENTITY b "c">]><hierarchy>&b;</hierarchy>')
    with pytest.raises(EnvError, match=r"no view tree|document type|no XML"):
        env.state()
