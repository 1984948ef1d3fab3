"""A window for tests that logs its events: `python x_window.py LOG`.

Each line of LOG is one event as JSON: ["button", x, y, number], ["key", keysym, state],
["keyup", keysym], ["move", x, y], and ["held", state] before a button with modifiers. A left click inside the square at (100, 100) to (140, 140) makes the window green.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from Xlib import X, display

SIDE = 400
MODIFIERS = X.ShiftMask | X.ControlMask | X.Mod1Mask | X.Mod4Mask


def main(log: str) -> None:
    screen = display.Display()
    root = screen.screen().root
    window = root.create_window(
        0, 0, SIDE, SIDE, 0, screen.screen().root_depth, background_pixel=0xFFFFFF,
        event_mask=X.ButtonPressMask | X.ButtonReleaseMask | X.KeyPressMask
        | X.KeyReleaseMask | X.PointerMotionMask | X.ExposureMask,
    )  # fmt: skip
    window.map()
    screen.sync()
    window.set_input_focus(X.RevertToParent, X.CurrentTime)
    screen.sync()
    with Path(log).open("a", encoding="utf-8") as file:

        def note(*event: object) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        note("ready")
        while True:
            event = screen.next_event()
            if event.type == X.ButtonPress:
                if event.state & MODIFIERS:
                    note("held", event.state & MODIFIERS)
                note("button", event.event_x, event.event_y, event.detail)
                if event.detail == 1 and 100 <= event.event_x < 140 and 100 <= event.event_y < 140:
                    window.change_attributes(background_pixel=0x00FF00)
                    window.clear_area()
                    screen.sync()
            elif event.type == X.ButtonRelease:
                note("release", event.event_x, event.event_y, event.detail)
            elif event.type == X.KeyPress:
                level = int(bool(event.state & X.ShiftMask))
                note("key", screen.keycode_to_keysym(event.detail, level), event.state)
            elif event.type == X.KeyRelease:
                note("keyup", screen.keycode_to_keysym(event.detail, 0))
            elif event.type == X.MotionNotify:
                note("move", event.event_x, event.event_y)
            elif event.type == X.MappingNotify:
                screen.refresh_keyboard_mapping(event)


if __name__ == "__main__":
    main(sys.argv[1])
