"""A vending machine: insert a coin, choose the drink that is named, open the flap that lights up.

Three steps in the right order; the wrong knob, drink or flap ends the episode. docs/your-application.md trains
the tiny model on it.
"""

import io
import random

from PIL import Image, ImageDraw

from envs.actions import Click, Done
from envs.base import Observation, Task, Verdict, task_of

COLOURS = {"red": (226, 29, 42), "green": (18, 158, 62), "blue": (28, 82, 235)}
SIDE = 168  # pixels
COLUMNS = (28, 84, 140)  # centres, pixels


class VendingEnv:
    """Drinks in the upper row, slot and refund knob in the middle, flaps below."""

    def reset(self, *, seed=None, options=None):
        task = task_of(options, VendingSuite.tasks, "vending")
        rng = random.Random(seed)
        self.drinks = rng.sample(list(COLOURS), k=3)
        self.goal = rng.choice(self.drinks)
        self.slot = rng.choice((0, 2))  # column of the coin slot; the refund knob is in the other
        self.flap = rng.choice((0, 2))  # column of the flap that lights up
        self.stage = "coin"  # coin, drink, flap, over
        self.taken, self.steps = None, 0
        self.max_steps = task.max_steps
        return self._look(), {"instruction": task.instruction.format(colour=self.goal)}

    def step(self, action):
        self.steps += 1
        if isinstance(action, Click):
            self._press(min(2, action.x * 3 // SIDE), min(2, action.y * 3 // SIDE))
        terminated = isinstance(action, Done) or self.stage == "over"
        return self._look(), None, terminated, self.steps >= self.max_steps, {}

    def evaluate(self):
        passed = self.taken == self.goal
        return Verdict("pass" if passed else "fail", f"took {self.taken}, wanted {self.goal}")

    def oracle_action(self):
        """The next action of a solution: what `dart data collect` plays."""
        if self.stage == "coin":
            return self._at(self.slot, 1)
        if self.stage == "drink":
            return self._at(self.drinks.index(self.goal), 0)
        return self._at(self.flap, 2)

    def close(self):
        """Nothing to free."""

    def _press(self, column, row):
        if self.stage == "coin" and row == 1 and column == self.slot:
            self.stage = "drink"
        elif row == 1 and column == 2 - self.slot:
            self.stage = "over"  # the knob gives the coin back
        elif self.stage == "drink" and row == 0:
            self.chosen = self.drinks[column]
            self.stage = "flap"
        elif self.stage == "flap" and row == 2 and column != 1:
            self.taken = self.chosen if column == self.flap else None
            self.stage = "over"

    def _at(self, column, row):
        return Click(x=COLUMNS[column], y=COLUMNS[row])

    def _look(self):
        image = Image.new("RGB", (SIDE, SIDE), "beige")
        draw = ImageDraw.Draw(image)
        for column, drink in zip(COLUMNS, self.drinks, strict=True):
            draw.rectangle((column - 20, 10, column + 20, 46), COLOURS[drink], "black", 1)
        slot, knob = COLUMNS[self.slot], COLUMNS[2 - self.slot]
        draw.rectangle((slot - 18, 66, slot + 18, 102), "black" if self.stage == "coin" else "gray")
        draw.ellipse((knob - 18, 66, knob + 18, 102), "white", "black", 3)
        for index in (0, 2):
            lit = self.stage == "flap" and index == self.flap
            box = (COLUMNS[index] - 24, 122, COLUMNS[index] + 24, 158)
            draw.rectangle(box, "orange" if lit else "lightgray", "black", 2)
        encoded = io.BytesIO()
        image.save(encoded, "PNG")
        return Observation(encoded.getvalue(), "image/png", SIDE, SIDE)


class VendingSuite:
    """One kind of task; the colour is drawn with the seed."""

    name = "vending"
    tasks = {"vending/buy": Task("vending/buy", name, "click the {colour} button", max_steps=5)}

    def make_env(self):
        return VendingEnv()
