"""A complete environment: a list of guests. The task is to remove the named guest, and to confirm it.

`dart up docs/examples/guests.toml` trains `builtin:small`, a model that reads, on it. From here to a policy
for your application: docs/your-application.md.
"""

import io
import random

from PIL import Image, ImageDraw, ImageFont

from envs import Click, Observation, Task, Verdict, task_of

NAMES = "Anna Boris Clara David Elena Felix Greta Hugo Irene Jonas Kira Lukas Maria Nils Olga Peter".split()
ANSWERS = [("Yes", "No"), ("Remove", "Keep"), ("OK", "Cancel")]
SIDE, ROW = 126, 28  # pixels
FONT = ImageFont.load_default(14)


class GuestsEnv:
    """A click on a guest asks whether to remove them; a click on either answer ends the episode."""

    def reset(self, *, seed=None, options=None):
        task = task_of(options, GuestsSuite.tasks, "guests")
        rng = random.Random(seed)
        self.guests = rng.sample(NAMES, k=4)
        self.goal = rng.choice(self.guests)
        self.yes, self.no = rng.choice(ANSWERS)
        self.buttons = rng.sample([self.yes, self.no], k=2)  # left, right
        self.candidate = None  # the guest in the dialog
        self.removed, self.steps = None, 0
        self.max_steps = task.max_steps
        return self._look(), {"instruction": task.instruction.format(name=self.goal)}

    def step(self, action):
        self.steps += 1
        terminated = False
        if isinstance(action, Click) and self.candidate is None:
            if 7 <= action.y < 7 + 4 * ROW:
                self.candidate = self.guests[(action.y - 7) // ROW]
        elif isinstance(action, Click) and 70 <= action.y < 98:
            terminated = True
            if self.buttons[action.x * 2 // SIDE] == self.yes:
                self.removed = self.candidate
        reward = float(terminated and self.evaluate().outcome == "pass")
        return self._look(), reward, terminated, self.steps >= self.max_steps, {}

    def evaluate(self):
        passed = self.removed == self.goal
        return Verdict("pass" if passed else "fail", f"removed {self.removed}, not {self.goal}")

    def oracle_action(self):
        """Return the next action of a solution. Optional: `dart data collect` plays it."""
        if self.candidate is None:
            return Click(x=SIDE // 2, y=7 + ROW * self.guests.index(self.goal) + ROW // 2)
        return Click(x=32 + 63 * self.buttons.index(self.yes), y=84)

    def close(self):
        """Nothing to free; a browser or a container would be stopped here."""

    def _look(self):
        image = Image.new("RGB", (SIDE, SIDE), "white")
        draw = ImageDraw.Draw(image)
        if self.candidate is None:
            for i, guest in enumerate(self.guests):
                draw.rectangle((6, 7 + i * ROW, 119, 7 + (i + 1) * ROW), "white", "gray")
                draw.text((14, 7 + i * ROW + ROW / 2), guest, "black", FONT, anchor="lm")
        else:
            draw.text((SIDE / 2, 40), f"Remove {self.candidate}?", "black", FONT, anchor="mm")
            for x, answer in zip((32, 95), self.buttons, strict=True):
                draw.rectangle((x - 29, 70, x + 29, 98), "lightgray", "black")
                draw.text((x, 84), answer, "black", FONT, anchor="mm")
        encoded = io.BytesIO()
        image.save(encoded, "PNG")
        return Observation(encoded.getvalue(), "image/png", SIDE, SIDE)


class GuestsSuite:
    """The suite, which `env.suite` names: its tasks by id, and a method that makes the environment."""

    name = "guests"
    tasks = {"guests/remove": Task("guests/remove", name, 'remove "{name}"', max_steps=4)}

    def make_env(self):
        return GuestsEnv()
