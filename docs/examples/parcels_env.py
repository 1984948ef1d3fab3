"""A parcel counter: choose the parcel, type the weight that the scale shows, stamp it: docs/your-application.md."""

import io
import random

from PIL import Image, ImageDraw, ImageFont

from envs.actions import Click, Type
from envs.base import Observation, Task, Verdict, task_of

COLOURS = {"red": (226, 29, 42), "green": (18, 158, 62), "blue": (28, 82, 235)}
SIDE = 168  # pixels
PLACES = (28, 84, 140)  # centres of the parcels, pixels
WEIGHTS = ("12", "37", "58", "94")  # what the scale can show
FONT = ImageFont.load_default(30)


class ParcelsEnv:
    """First screen: three parcels. Second: a scale, a field for the weight, a stamp and a bin."""

    def reset(self, *, seed=None, options=None):
        self.task = task_of(options, ParcelsSuite.tasks, "parcels")
        rng = random.Random(seed)
        self.parcels = rng.sample(list(COLOURS), k=3)
        self.goal = rng.choice(self.parcels)
        self.weight = rng.choice(WEIGHTS)
        self.stamp = rng.choice((42, 126))  # x of the stamp; the bin is on the other side
        self.parcel, self.typed, self.sent, self.steps = None, "", None, 0
        return self._look(), {"instruction": self.task.instruction.format(colour=self.goal)}

    def step(self, action):
        self.steps += 1
        if isinstance(action, Click) and self.parcel is None:
            if 30 <= action.y <= 90:
                self.parcel = self.parcels[min(2, action.x * 3 // SIDE)]
        elif isinstance(action, Type) and self.parcel is not None:
            self.typed = action.text
        elif isinstance(action, Click) and action.y > 110:
            self.sent = abs(action.x - self.stamp) < 30  # the bin throws it away
        over = self.sent is not None
        return self._look(), None, over, self.steps >= self.task.max_steps, {}

    def evaluate(self):
        right = self.sent and self.parcel == self.goal and self.typed == self.weight
        state = f"{self.parcel} parcel, {self.typed!r} of {self.weight}, sent: {self.sent}"
        return Verdict("pass" if right else "fail", state)

    def oracle_action(self):
        """The next right action; without it there is nothing that `dart data collect` can play."""
        if self.parcel is None:
            return Click(x=PLACES[self.parcels.index(self.goal)], y=60)
        if self.typed != self.weight:
            return Type(text=self.weight)
        return Click(x=self.stamp, y=138)

    def close(self):
        """Nothing to free."""

    def _look(self):
        image = Image.new("RGB", (SIDE, SIDE), "white")
        draw = ImageDraw.Draw(image)
        if self.parcel is None:
            for x, colour in zip(PLACES, self.parcels, strict=True):
                draw.rectangle((x - 24, 36, x + 24, 84), COLOURS[colour], "black", 2)
        else:
            draw.rectangle((12, 10, 80, 54), "black")
            draw.text((46, 32), self.weight, "white", FONT, anchor="mm")
            draw.rectangle((88, 10, 156, 54), "white", "black", 2)
            draw.text((122, 32), self.typed, "black", FONT, anchor="mm")
            draw.rectangle((self.stamp - 24, 114, self.stamp + 24, 162), "orange", "black", 2)
            other = SIDE - self.stamp
            draw.ellipse((other - 24, 114, other + 24, 162), "gray", "black", 2)
        encoded = io.BytesIO()
        image.save(encoded, "PNG")
        return Observation(encoded.getvalue(), "image/png", SIDE, SIDE)


class ParcelsSuite:
    """One kind of task; colour and weight are drawn with the seed."""

    name = "parcels"
    tasks = {"parcels/send": Task("parcels/send", name, "click the {colour} button", max_steps=5)}

    def make_env(self):
        return ParcelsEnv()
