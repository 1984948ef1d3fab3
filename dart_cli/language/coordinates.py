"""Coordinates: the map between the numbers that a model writes and the pixels of the screenshot.

    CoordinateMap         the map of one screenshot, in exact integer arithmetic
    make_coordinate_map   makes the map of a configured convention (`policy.coordinates`)
    resize_of             returns how the model's image processor resizes a screen
    smart_resize          computes the size to which Qwen's image processors resize a screenshot
    screen_tokens         returns the number of tokens of a screen
    pointer_after         returns where the mouse pointer is after an action

A number of the model names a cell of the model's grid. It maps to the pixel that contains the centre of the
cell, and a pixel maps to the cell that contains the centre of the pixel. If the grid is at least as fine as
the screen, the way from pixel to number to pixel is exact.

Numbers beyond the grid raise ActionError and are never clamped: a click off the screen is the policy's
mistake, and it should see the error. There is one exception: `resized` and `unit` numbers may be the width or
height itself, which means the last pixel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bus.errors import ActionError
from dart_cli.config.model_folder import Screens, screens_of
from dart_cli.config.schema import Config
from envs.contract.actions import Action, Drag

CoordinateConvention = Literal["thousandths", "thousand", "resized", "unit"]

THOUSAND = 1000
UNIT_DECIMALS = 4  # of a number 0-1: finer than the pixels of any screen up to 10,000 a side
MAX_ASPECT = 200  # smart_resize refuses longer strips, as Qwen's processors do


UI_TARS = Screens(28, 100 * 28 * 28, 16384 * 28 * 28)
"""The preprocessor of UI-TARS-1.5's own code: 1920x1080 -> 1932x1092 pixels."""


def resize_of(config: Config) -> Screens:
    """Return how the model's image processor resizes a screen.

    Only `resized` coordinates depend on it; for the others the model's folder is not read, and the result is
    UI_TARS. Raises ModelError if the folder does not state it.
    """
    return screens_of(config) if config.policy.coordinates == "resized" else UI_TARS


@dataclass(frozen=True)
class CoordinateMap:
    """Maps a model's grid of `grid_width` x `grid_height` onto `width` x `height` pixels."""

    width: int  # pixels of the screenshot
    height: int
    grid_width: int  # the model writes x in 0 .. grid_width - 1
    grid_height: int
    has_edge: bool = False  # x = grid_width and y = grid_height are read, too, as the last pixel
    decimals: int = 0  # a cell is written as its number divided by 10 ** decimals
    pointer: tuple[int, int] | None = None
    """The pixel of the mouse pointer after the actions so far; None if no action has moved it. It is needed
    by languages with calls that act where the pointer is."""
    assumes_places: bool = True
    """True if a call without a place acts where the pointer is, or in the middle of the screen if no action
    has moved it, as when an episode is played. When pointing is measured, such a call is an error."""

    @property
    def centre(self) -> tuple[int, int]:
        """The pixel in the middle of the screenshot. Raises ActionError unless `assumes_places`."""
        if not self.assumes_places:
            raise ActionError("the call has no place")
        return self.width // 2, self.height // 2

    @property
    def pointer_or_centre(self) -> tuple[int, int]:
        """The pixel where a call without a place acts: the pointer, or `centre` if no action has moved it.

        Raises ActionError as `centre` does.
        """
        return self.centre if self.pointer is None else self.pointer

    def to_screen(self, x: int, y: int) -> tuple[int, int]:
        """Return the pixel that the model's (x, y) names. Raises ActionError if it is beyond the screen."""
        if self.has_edge:
            x -= x == self.grid_width
            y -= y == self.grid_height
        return (
            _rescale("x", x, self.grid_width, self.width),
            _rescale("y", y, self.grid_height, self.height),
        )

    def to_model(self, x: int, y: int) -> tuple[int, int]:
        """Return the numbers that a model writes for pixel (x, y).

        Raises ActionError if it is beyond the screen.
        """
        return (
            _rescale("x", x, self.width, self.grid_width),
            _rescale("y", y, self.height, self.grid_height),
        )


AS_IT_IS = CoordinateMap(10**6, 10**6, 10**6, 10**6, pointer=(0, 0))
"""A map in which numbers below a million stand for themselves, to read a text without a screen."""


def pointer_after(action: Action, before: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the pixel of the mouse pointer after `action`; `before` is its pixel before the action."""
    if isinstance(action, Drag):
        return action.path[-1]
    x, y = getattr(action, "x", None), getattr(action, "y", None)
    return before if x is None or y is None else (x, y)


def make_coordinate_map(
    convention: CoordinateConvention, width: int, height: int, resize: Screens = UI_TARS
) -> CoordinateMap:
    """Return the map of one screenshot of `width` x `height` pixels.

    `thousandths`: numbers 0-999 of each side. `thousand`: 0-1000, both ends included, as Qwen2-VL
    and Qwen3-VL write them. `resized`: absolute pixels of the screenshot as the model's image
    processor resizes it (Qwen2.5-VL, UI-TARS-1.5), 0 to the width: UI-TARS' own parser divides by the
    width (github.com/bytedance/UI-TARS, action_parser.py), so that the width is the screen's edge.
    `unit`: 0 to 1 of each side, with decimals (OpenCUA-Qwen2-7B). Raises ActionError as `smart_resize` does,
    for `resized` numbers alone.
    """
    if convention == "thousandths":
        return CoordinateMap(width, height, THOUSAND, THOUSAND)
    if convention == "thousand":
        return CoordinateMap(width, height, THOUSAND + 1, THOUSAND + 1)
    if convention == "unit":
        grid = 10**UNIT_DECIMALS
        return CoordinateMap(width, height, grid, grid, has_edge=True, decimals=UNIT_DECIMALS)
    grid_height, grid_width = smart_resize(height, width, **resize._asdict())
    return CoordinateMap(width, height, grid_width, grid_height, has_edge=True)


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return (height, width) after Qwen2-VL's resize (arXiv 2409.12191; transformers Qwen2VLImageProcessor).

    Both sides become multiples of `factor`, the area stays within the bounds, and the aspect ratio changes as
    little as that allows. Raises ActionError for a strip longer than 200 : 1.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ActionError(f"a {width}x{height} screenshot is too long a strip (over 200 : 1)")
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def screen_tokens(screen: tuple[int, int], resize: Screens) -> int:
    """Return the number of tokens of a screen of (width, height) pixels.

    Raises ActionError as `smart_resize` does.
    """
    height, width = smart_resize(screen[1], screen[0], **resize._asdict())
    return max(1, width * height // resize.factor**2)


def _rescale(axis: str, value: int, from_size: int, to_size: int) -> int:
    """Return which of `to_size` cells contains the centre of cell `value` of `from_size` cells.

    Raises ActionError if there is no such cell; `axis` is its name in the message.
    """
    if not 0 <= value < from_size:
        raise ActionError(f"{axis}={value} is beyond the screen: 0 to {from_size - 1}")
    return (2 * value + 1) * to_size // (2 * from_size)
