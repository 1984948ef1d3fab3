"""The embedded suites: their templates and sizes.

Instances differ by seed: layout, theme, colours and distractors. By convention seeds below
1,000,000 are for training and those from there on for evaluation; templates whose split is
`heldout` are never trained on at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from envs.contract.base import Split, Task
from envs.contract.options import Count, ImageEncoding, Size, checked
from envs.suites.embedded.apps import centre, mail, shop
from envs.suites.embedded.env import EmbeddedEnv
from envs.suites.embedded.scene import SceneFactory
from envs.suites.embedded.tasks import (
    files,
    forms,
    mini,
    mini_scenes,
    panels,
    settings,
    small,
)
from envs.suites.embedded.theme import DESK_THEMES

_MINI_KINDS: dict[str, tuple[type[mini.MiniScene], int]] = {
    "click": (mini.ClickScene, 1),
    "menu": (mini_scenes.MenuScene, 2),
    "page": (mini_scenes.PageScene, 3),
    "tabs": (mini_scenes.TabsScene, 2),
    "scroll": (mini_scenes.ScrollScene, 3),
    "folder": (mini_scenes.FolderScene, 2),
    "form": (mini_scenes.FormScene, 2),
    "dropdown": (mini_scenes.DropdownScene, 2),
    "delete": (mini_scenes.DeleteScene, 2),
}
"""Where the target is -> scene, and the most steps it takes to reach it."""

MINI_TRAIN = "click popup menu page confirm tabs dropdown form scroll folder delete".split()
MINI_HELDOUT = (
    "popup+menu popup+tabs popup+form popup+delete menu+confirm page+confirm folder+confirm popup+scroll "
    "popup+page+confirm"
).split()
"""Combinations of templates that are trained on separately; never trained on themselves."""

SLACK = 2  # steps beyond the shortest solution that suite mini allows
DESK_SLACK = 5


class MiniSuite:
    """Screens without letters for a very small model; the instruction names a colour."""

    name = "mini"
    size = (168, 168)
    most_slack = SLACK  # of any environment
    kinds: Mapping[str, Split] = {
        **dict.fromkeys(MINI_TRAIN, "train"),
        **dict.fromkeys(MINI_HELDOUT, "heldout"),
    }

    def __init__(self) -> None:
        tasks: dict[str, Task] = {}
        scenes: dict[str, SceneFactory] = {}
        for kind, split in self.kinds.items():
            parts = kind.split("+")
            where = next((part for part in parts if part in _MINI_KINDS), "click")
            scene, steps = _MINI_KINDS[where]
            popup, confirm = parts.count("popup"), "confirm" in parts
            steps += popup + confirm
            task_id = f"{self.name}/{kind}"
            scenes[task_id] = partial(scene, popup=popup, confirm=confirm)
            tasks[task_id] = Task(
                task_id,
                self.name,
                scene.phrase,
                max_steps=steps + self.most_slack,
                tier=steps,
                split=split,
            )
        self.tasks: Mapping[str, Task] = tasks
        self.scenes: Mapping[str, SceneFactory] = scenes

    @checked
    def make_env(
        self,
        *,
        size: Size = size,
        encoding: ImageEncoding = "png",
        slack: Count = SLACK,
    ) -> EmbeddedEnv:
        """Return an environment of `size` pixels: (width, height) or "168x168", in PNG or JPEG."""
        return EmbeddedEnv(
            self.name,
            self.tasks,
            self.scenes,
            size=size,
            design=self.size,
            max_scale=8.0,
            encoding=encoding,
            slack=slack,
        )


class ComposedSuite(MiniSuite):
    """Every kind of `mini` behind no, one or two pop-ups, without and with a confirmation.

    All may be trained on: for measuring which tasks are worth training on. With `slack` of up to ten a failure
    takes long, as elsewhere.
    """

    name = "composed"
    most_slack = 10
    kinds: Mapping[str, Split] = {
        "+".join((*before, kind, *after)): "train"
        for kind in _MINI_KINDS
        for before in ((), ("popup",), ("popup", "popup"))
        for after in ((), ("confirm",))
    }


class RecallSuite(MiniSuite):
    """A slide show, and `recall/LAG`: the button that it showed LAG pages ago, among its copies."""

    name = "recall"
    lags = range(1, 7)

    def __init__(self) -> None:
        self.scenes: Mapping[str, SceneFactory] = {
            f"{self.name}/{lag}": partial(mini.RecallScene, lag=lag) for lag in self.lags
        }
        self.tasks: Mapping[str, Task] = {
            f"{self.name}/{lag}": Task(
                f"{self.name}/{lag}",
                self.name,
                mini.RecallScene.phrase,
                max_steps=mini.MOST_BEFORE + lag + 1 + SLACK,
                tier=lag + 1,
            )
            for lag in self.lags
        }


Templates = Mapping[str, tuple[SceneFactory, int, Split]]
"""Template -> scene, the most steps that its shortest solution takes, split."""

_DESK: Templates = {
    "press": (small.PressScene, 1, "train"),
    "menu": (small.DeskMenuScene, 2, "train"),
    "close": (small.CloseScene, 2, "train"),
    "calculator": (small.CalculatorScene, 6, "train"),
    "list": (small.ListScene, 3, "train"),
    "contacts": (small.ContactsScene, 4, "train"),
    "chores": (small.ChoresScene, 5, "train"),
    "check": (panels.CheckScene, 4, "train"),
    "radio": (panels.RadioScene, 2, "train"),
    "combo": (panels.ComboScene, 4, "train"),
    "text": (panels.TextScene, 3, "train"),
    "edit": (panels.EditScene, 4, "train"),
    "slider": (panels.SliderScene, 2, "train"),
    "stepper": (panels.StepperScene, 4, "train"),
    "tabs": (panels.DeskTabsScene, 5, "train"),
    "login": (forms.LoginScene, 5, "train"),
    "sign-up": (forms.SignUpScene, 10, "train"),
    "order": (forms.OrderScene, 9, "heldout"),
    "wizard": (forms.WizardScene, 8, "train"),
    "settings-switch": (settings.SettingsSwitchScene, 4, "train"),
    "settings-choice": (settings.SettingsChoiceScene, 6, "train"),
    "settings-level": (settings.SettingsLevelScene, 4, "train"),
    "settings-two": (settings.SettingsTwoScene, 9, "train"),
    "settings-three": (settings.SettingsThreeScene, 12, "heldout"),
    "files-open": (files.OpenScene, 3, "train"),
    "files-delete": (files.DeskDeleteScene, 5, "train"),
    "files-rename": (files.RenameScene, 5, "train"),
    "files-new": (files.NewFolderScene, 5, "train"),
    "files-move": (files.MoveScene, 5, "train"),
    "files-copy": (files.CopyScene, 5, "heldout"),
    "files-tidy": (files.TidyScene, 10, "heldout"),
}


class DeskSuite:
    """Lettered applications: forms, lists, settings, a file manager."""

    name = "desk"
    size = (448, 336)
    templates: Templates = _DESK

    def __init__(self) -> None:
        made = {f"{self.name}/{kind}": each for kind, each in self.templates.items()}
        self.scenes: Mapping[str, SceneFactory] = {name: each[0] for name, each in made.items()}
        self.tasks: Mapping[str, Task] = {
            name: Task(
                name,
                self.name,
                "{instruction}",
                max_steps=steps + DESK_SLACK,
                tier=steps,
                split=split,
                params=self.params_of(name),
            )
            for name, (_, steps, split) in made.items()
        }

    @staticmethod
    def params_of(_: str) -> Mapping[str, str]:
        """Of the task of that id."""
        return {}

    @checked
    def make_env(
        self,
        *,
        size: Size = size,
        encoding: ImageEncoding = "png",
        slack: Count = DESK_SLACK,
    ) -> EmbeddedEnv:
        """Return an environment of `size` pixels: (width, height) or "448x336", in PNG or JPEG."""
        return EmbeddedEnv(
            self.name,
            self.tasks,
            self.scenes,
            size=size,
            design=self.size,
            max_scale=1.6,
            encoding=encoding,
            slack=slack,
            themes=DESK_THEMES,
        )


_APPS: Templates = {
    "mail-star": (mail.StarScene, 3, "train"),
    "mail-archive": (mail.ArchiveScene, 3, "train"),
    "mail-delete": (mail.DeleteMailScene, 5, "train"),
    "mail-write": (mail.WriteScene, 7, "train"),
    "mail-reply": (mail.ReplyScene, 6, "train"),
    "mail-setting": (mail.MailSettingScene, 6, "train"),
    "mail-restore": (mail.RestoreScene, 4, "heldout"),
    "mail-empty": (mail.EmptyTrashScene, 4, "heldout"),
    "shop-add": (shop.AddScene, 4, "train"),
    "shop-wish": (shop.WishScene, 4, "train"),
    "shop-take": (shop.TakeScene, 3, "train"),
    "shop-count": (shop.CountScene, 6, "train"),
    "shop-newsletter": (shop.NewsletterScene, 4, "train"),
    "shop-cancel": (shop.CancelScene, 5, "heldout"),
    "shop-order": (shop.OrderScene, 10, "heldout"),
    "centre-connect": (centre.ConnectScene, 4, "train"),
    "centre-panel": (centre.PanelScene, 4, "train"),
    "centre-right": (centre.RightScene, 5, "train"),
    "centre-remove": (centre.RemoveScene, 5, "train"),
    "centre-user": (centre.AddUserScene, 5, "train"),
    "centre-role": (centre.RoleScene, 5, "heldout"),
    "centre-forget": (centre.ForgetScene, 5, "heldout"),
}


class AppsSuite(DeskSuite):
    """A mail client, a shop and a settings centre: many screens each, for tasks and for exploring."""

    name = "apps"
    templates = _APPS

    @staticmethod
    def params_of(task_id: str) -> Mapping[str, str]:
        """Return the application that it is about."""
        return {"application": task_id.partition("/")[2].partition("-")[0]}
