"""Grounding sets in each published layout, of two small screens of our own."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

SIZE = (200, 100)
BOX = (40, 20, 100, 50)  # left, top, right, bottom
XYWH = [40, 20, 60, 30]
XYXY = [40, 20, 100, 50]
SHARES = [0.2, 0.2, 0.5, 0.5]


def screen(path: Path) -> None:
    """One screen with a button at BOX."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", SIZE, "white")
    ImageDraw.Draw(image).rectangle(BOX, "red", "black")
    image.save(path)


def write(path: Path, rows: Any) -> None:
    """An annotation file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows))


def read(path: Path) -> Any:
    """The rows of an annotation file, to alter them."""
    return json.loads(path.read_text())


def screenspot(folder: Path) -> None:
    """Its two rows are of different parts."""
    for part, source, element in (("desktop", "windows", "text"), ("web", "gitlab", "icon")):
        screen(folder / "screenspot_imgs" / f"{part}.png")
        row = {
            "img_filename": f"{part}.png",
            "instruction": "click the red button",
            "bbox": XYWH,
            "data_type": element,
            "data_source": source,
        }
        write(folder / f"screenspot_{part}.json", [row])


FILE = "data/test-00000-of-00001.parquet"


def screenspot_parquet(folder: Path, rows: int = 2, box: list[float] = SHARES) -> None:
    """Two rows in a row group; a corner of each picture tells its number."""
    pictures = []
    for number in range(rows):
        image = Image.new("RGB", SIZE, (number, 0, 0))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        pictures.append({"bytes": buffer.getvalue(), "path": f"{number}.png"})
    table = pa.table(
        {
            "file_name": [f"{number}.png" for number in range(rows)],
            "bbox": [box] * rows,
            "instruction": ["click the red button"] * rows,
            "data_type": ["text", "icon", *["icon"] * rows][:rows],
            "data_source": ["windows", "gitlab", *["ios"] * rows][:rows],
            "image": pictures,
        }
    )
    (folder / "data").mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / FILE, row_group_size=2)


def screenspot_v2(folder: Path) -> None:
    """As ScreenSpot, under other names."""
    screenspot(folder)
    (folder / "screenspot_imgs").rename(folder / "screenspotv2_image")
    for part in ("desktop", "web"):
        (folder / f"screenspot_{part}.json").rename(folder / f"screenspot_{part}_v2.json")


def screenspot_v2_new(folder: Path) -> None:
    """The names of v2, other keys and another form."""
    for part, element in (("desktop", "text"), ("web", "icon")):
        screen(folder / "screenspotv2_image" / f"{part}.png")
        row = {
            "img_filename": f"{part}.png",
            "bbox": XYXY,
            "instruction": "click the red button",
            "img_size": list(SIZE),
            "platform": "windows",
            "ui_type": element,
            "group": part,
        }
        write(folder / f"screenspot_{part}_v2.json", [row])


def screenspot_pro(folder: Path) -> None:
    """A file for each application, and one with all of them again."""
    rows = []
    for application, group, element in (("vscode", "Dev", "text"), ("blender", "CAD", "icon")):
        screen(folder / "images" / application / "a.png")
        row = {
            "id": f"{application}_0",
            "img_filename": f"{application}/a.png",
            "instruction": "click the red button",
            "instruction_cn": "",
            "bbox": XYXY,
            "img_size": list(SIZE),
            "ui_type": element,
            "group": group,
            "platform": "windows",
            "application": application,
        }
        rows.append(row)
        write(folder / "annotations" / f"{application}.json", [row])
    write(folder / "annotations" / "all.json", rows)


def osworld_g(folder: Path, name: str = "OSWorld-G.json") -> None:
    """A box, a triangle and a refusal."""
    screen(folder / "images" / "a.png")
    row = {
        "image_path": "a.png",
        "image_size": list(SIZE),
        "instruction": "click the red button",
        "GUI_types": ["Button", "Label"],
    }
    triangle = [40, 20, 100, 20, 40, 50]
    rows = [
        {**row, "id": "a", "box_type": "bbox", "box_coordinates": XYWH},
        {**row, "id": "b", "box_type": "polygon", "box_coordinates": triangle},
        {**row, "id": "c", "box_type": "refusal", "box_coordinates": [-1, -1, -1, -1]},
    ]
    write(folder / name, rows)
    classified = {"text_matching": [{"id": "a"}], "refusal": [{"id": "c"}]}
    write(folder / "classification_result.json", {"classified": classified})


def osworld_g_refined(folder: Path) -> None:
    """The same with other instructions."""
    osworld_g(folder, "OSWorld-G_refined.json")


def ui_vision(folder: Path) -> None:
    """The corners of its second box are swapped."""
    for part, box in (("basic", XYXY), ("spatial", [100, 50, 40, 20])):
        screen(folder / "images" / "element_grounding" / f"{part}.png")
        row = {
            "image_path": f"element_grounding/{part}.png",
            "image_size": list(SIZE),
            "prompt_to_evaluate": "click the red button",
            "platform": "VSCode",
            "element_type": "Button",
            "bbox": box,
        }
        write(
            folder / "annotations" / "element_grounding" / f"element_grounding_{part}.json", [row]
        )


def mmbench_gui_l2(folder: Path) -> None:
    """Shares, pixels, and pixels with a -1 for 0."""
    rows = []
    for platform, kind, box in (
        ("os_windows", "basic", SHARES),
        ("os_ios", "advanced", XYXY),
        ("os_ios", "basic", [-1, -1, 100, 50]),
    ):
        screen(folder / "offline_images" / platform / "a.png")
        rows.append(
            {
                "index": len(rows),
                "image_path": "a.png",
                "instruction": "click the red button",
                "bbox": box,
                "image_size": list(SIZE),
                "data_type": "icon",
                "platform": platform,
                "app_name": "calendar",
                "grounding_type": kind,
            }
        )
    write(folder / "L2_annotations.json", rows)


SETS: dict[str, Callable[[Path], None]] = {
    "screenspot": screenspot,
    "screenspot-parquet": screenspot_parquet,
    "screenspot-v2": screenspot_v2,
    "screenspot-v2-new": screenspot_v2_new,
    "screenspot-pro": screenspot_pro,
    "osworld-g": osworld_g,
    "osworld-g-refined": osworld_g_refined,
    "ui-vision": ui_vision,
    "mmbench-gui-l2": mmbench_gui_l2,
}
"""Name of the layout -> what writes such a set."""
