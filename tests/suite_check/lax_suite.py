"""A suite in which each task has a different mistake: an evaluator that passes too much, or an error."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from bus.errors import EnvError
from envs.contract.actions import Action, Click, Done, Fail, Wait
from envs.contract.base import GuiEnv, Observation, Task, Verdict

_COUNTER = itertools.count()


def screen(colour: int = 0) -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", (20, 10), (colour % 256, 0, 0)).save(encoded, "PNG")
    return encoded.getvalue()


class LaxEnv:
    """Each task is lax in its own way; `lax/sound` is passed by a click on the left half."""

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        self.kind = (options or {})["task"].id.removeprefix("lax/")
        self.steps, self.last, self.clicked = 0, None, False
        count = next(_COUNTER)
        if self.kind == "other-words":
            return self._look(), {"instruction": f"click {count}"}
        visible = self._look(count if self.kind == "other-pixels" else 0)
        sent = {"no-image": b"xx", "half-image": visible.screenshot[:45]}
        return replace(visible, screenshot=sent.get(self.kind, visible.screenshot)), {}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.last: Action | None = action
        self.clicked |= isinstance(action, Click) and action.x < 10
        return self._look(), 0.0, self.clicked, self.steps >= 3, {}

    def evaluate(self) -> Verdict:
        lax = {
            "true": True,
            "waits": self.steps >= 3,
            "believes": isinstance(self.last, Done),
            "gives-up": isinstance(self.last, Fail),
            "infeasible": isinstance(self.last, Fail),
            "wide": isinstance(self.last, Click),
        }
        passed = lax.get(self.kind, self.clicked)
        return Verdict("pass" if passed else "fail", f"{self.kind}, step {self.steps}")

    def oracle_action(self) -> Action:
        if self.kind in ("infeasible", "believes", "gives-up"):
            raise EnvError("no way")
        return Wait() if self.kind == "bad-oracle" else Click(x=2, y=2)

    def close(self) -> None:
        return None

    def _look(self, colour: int = 0) -> Observation:
        return Observation(screen(colour), "image/png", 20, 10)


class LaxSuite:
    """Suite of the tasks above, with a file that could not be read."""

    name = "lax"
    errors: Sequence[str] = ("tasks/x.json: id is missing",)
    tasks: Mapping[str, Task] = {
        f"lax/{kind}": Task(
            *(f"lax/{kind}", "lax", "click {what}" if kind == "no-words" else "click", 4),
            feasible=kind != "infeasible",
        )
        for kind in (
            *("sound", "true", "waits", "believes", "gives-up", "wide", "infeasible"),
            *("bad-oracle", "other-words", "other-pixels", "no-image", "half-image", "no-words"),
        )
    }

    def make_env(self) -> GuiEnv:
        return LaxEnv()
