"""A login form: type the user name and the password into their fields, log in, and continue.

It takes six steps on two screens. The seed decides the places, order and labels of fields and buttons, the
name and the password. docs/your-application.md trains `builtin:small` on it.
"""

import io
import random

from PIL import Image, ImageDraw, ImageFont

from envs import Click, Observation, Task, Type, Verdict, task_of

WIDTH, HEIGHT = 126, 168  # pixels
USERS = ("User", "Username", "User name", "Account")  # what the fields and buttons are called
PASSWORDS = ("Password", "Passcode", "Pass phrase")
LOGINS = ("Log in", "Login", "Sign in", "Submit")
CONTINUES = ("Continue", "Next", "Proceed")
FONT = ImageFont.load_default(13)


def word(rng):
    """Return six letters that can be pronounced."""
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3))


class LoginEnv:
    """The first screen has two fields and the buttons log in and cancel, the second continue and log out.

    Typing replaces the text of a field.
    """

    def reset(self, *, seed=None, options=None):
        self.task = task_of(options, LoginSuite.tasks, "login")
        rng = random.Random(seed)
        self.account = {"user": word(rng).capitalize(), "password": word(rng)}
        self.labels = {"user": rng.choice(USERS), "password": rng.choice(PASSWORDS)}
        self.labels |= {"login": rng.choice(LOGINS), "cancel": "Cancel"}
        self.labels |= {"continue": rng.choice(CONTINUES), "logout": "Log out"}
        left, top = rng.randint(6, 14), rng.randint(30, 40)
        fields = rng.sample(["user", "password"], k=2)
        # The places of fields and buttons on the two screens: left, top, right, bottom.
        self.form = {
            name: (left, top + 42 * i, left + 104, top + 42 * i + 22)
            for i, name in enumerate(fields)
        } | self._pair(rng, ["login", "cancel"], rng.randint(120, 138))
        self.welcome = self._pair(rng, ["continue", "logout"], rng.randint(50, 138))
        self.typed = {"user": "", "password": ""}
        self.focus, self.message, self.inside, self.over = None, "", False, False
        self.steps = 0
        return self._look(), {"instruction": self.task.instruction.format(**self.account)}

    def step(self, action):
        self.steps += 1
        if isinstance(action, Type) and self.focus:
            self.typed[self.focus] = action.text
        elif isinstance(action, Click):
            places = self.welcome if self.inside else self.form
            for name, (left, top, right, bottom) in places.items():
                if left <= action.x <= right and top <= action.y <= bottom:
                    self._press(name)
        return self._look(), None, self.over, self.steps >= self.task.max_steps, {}

    def evaluate(self):
        passed = self.inside and self.over
        state = f"logged in: {self.inside}, ended: {self.over}, typed {self.typed}"
        return Verdict("pass" if passed else "fail", state)

    def oracle_action(self):
        """Return the next action of a solution, which `dart data collect` plays."""
        if self.inside:
            return self._middle(self.welcome["continue"])
        for name in ("user", "password"):
            if self.typed[name] != self.account[name]:
                focused = self.focus == name
                return Type(text=self.account[name]) if focused else self._middle(self.form[name])
        return self._middle(self.form["login"])

    def oracle_hint(self):
        """Return the same in words that `builtin:small` knows, which a teacher's prompt may name."""
        if self.inside:
            return f'click "{self.labels["continue"]}"'
        for name in ("user", "password"):
            if self.typed[name] != self.account[name]:
                if self.focus == name:
                    return f'type "{self.account[name]}"'
                return f"click the field {self.labels[name]}"
        return f'click "{self.labels["login"]}"'

    def close(self):
        """Nothing to free."""

    def _press(self, name):
        self.message = ""
        if name in self.typed:
            self.focus = name
        elif name == "login":
            self.inside = self.typed == self.account
            self.message = "" if self.inside else "Wrong account"
        elif name == "cancel":
            self.typed, self.focus = {"user": "", "password": ""}, None
        else:
            self.over, self.inside = True, name == "continue"

    @staticmethod
    def _pair(rng, names, top):
        """Return the places of two buttons side by side, in random order."""
        return {
            name: (left, top, left + 57, top + 24)
            for name, left in zip(rng.sample(names, k=2), (4, 65), strict=True)
        }

    @staticmethod
    def _middle(box):
        return Click(x=(box[0] + box[2]) // 2, y=(box[1] + box[3]) // 2)

    def _look(self):
        image = Image.new("RGB", (WIDTH, HEIGHT), "white")
        draw = ImageDraw.Draw(image)
        title = f"Welcome, {self.account['user']}" if self.inside else self.message
        draw.text((6, 9), title, "black" if self.inside else "red", FONT, anchor="lm")
        for name, box in (self.welcome if self.inside else self.form).items():
            left, top, right, bottom = box
            if name in self.typed:
                on = self.focus == name
                text = self.typed[name] if name == "user" else "*" * len(self.typed[name])
                draw.text((left, top - 8), self.labels[name], "black", FONT, anchor="lm")
                draw.rectangle(box, "lightyellow" if on else "white", "blue" if on else "gray", 2)
                draw.text((left + 6, (top + bottom) / 2), text, "black", FONT, anchor="lm")
            else:
                middle = ((left + right) / 2, (top + bottom) / 2)
                draw.rectangle(box, "lightgray", "black")
                draw.text(middle, self.labels[name], "black", FONT, anchor="mm")
        encoded = io.BytesIO()
        image.save(encoded, "PNG")
        return Observation(encoded.getvalue(), "image/png", WIDTH, HEIGHT)


class LoginSuite:
    """One task; the seed decides the account and the screens."""

    name = "login"
    tasks = {
        "login/enter": Task(
            "login/enter", name, 'Log in as "{user}" with password "{password}"', max_steps=9
        )
    }

    def make_env(self):
        return LoginEnv()
