"""The embedded suites: their templates and sizes.

EmbeddedSuite   the base class of the suites: a task for each template, and an environment that plays them

Instances differ by seed: layout, theme, colours and distractors. By convention seeds below
1,000,000 are for training and those from there on for evaluation; templates whose split is
`heldout` are never trained on at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

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
from envs.suites.embedded.theme import DESK_THEMES, THEMES, Theme

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
"""Kind of task -> its scene, and the most steps that it takes to reach the target."""

MINI_TRAIN = "click popup menu page confirm tabs dropdown form scroll folder delete".split()
MINI_HELDOUT = (
    "popup+menu popup+tabs popup+form popup+delete menu+confirm page+confirm folder+confirm popup+scroll "
    "popup+page+confirm"
).split()
"""Combinations of templates. The templates are trained on one by one, the combinations never."""


class EmbeddedSuite:
    """A suite of scenes of this toolkit. A subclass sets the attributes, then adds its tasks one by one."""

    name: str
    size: tuple[int, int]  # pixels, the least for which its scenes are laid out
    max_scale: float
    slack: int  # steps beyond the shortest solution that an environment allows by default
    most_slack: int  # the largest slack that a task's `max_steps` leaves room for
    themes: tuple[Theme, ...] = THEMES

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.scenes: dict[str, SceneFactory] = {}

    def add(
        self,
        kind: str,
        scene: SceneFactory,
        *,
        instruction: str,
        steps: int,
        tier: int | None = None,
        split: Split = "train",
        params: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Add the task `NAME/kind`, whose shortest solution takes at most `steps` (the default of `tier`)."""
        task_id = f"{self.name}/{kind}"
        self.scenes[task_id] = scene
        self.tasks[task_id] = Task(
            task_id,
            self.name,
            instruction,
            max_steps=steps + self.most_slack,
            tier=steps if tier is None else tier,
            split=split,
            params=params,
        )

    @checked
    def make_env(
        self,
        *,
        size: Size | None = None,
        encoding: ImageEncoding = "png",
        slack: Count | None = None,
    ) -> EmbeddedEnv:
        """Return an environment of `size` pixels, (width, height) or "448x336", in PNG or JPEG.

        `size` and `slack` default to the suite's own.
        """
        return EmbeddedEnv(
            self.name,
            self.tasks,
            self.scenes,
            size=self.size if size is None else size,
            design=self.size,
            max_scale=self.max_scale,
            encoding=encoding,
            slack=self.slack if slack is None else slack,
            themes=self.themes,
        )


class MiniSuite(EmbeddedSuite):
    """Screens without letters for a very small model; the instruction names a colour."""

    name = "mini"
    size = (168, 168)
    max_scale = 8.0
    slack = 2
    most_slack = 2
    kinds: Mapping[str, Split] = {
        **dict.fromkeys(MINI_TRAIN, "train"),
        **dict.fromkeys(MINI_HELDOUT, "heldout"),
    }

    def __init__(self) -> None:
        super().__init__()
        for kind, split in self.kinds.items():
            parts = kind.split("+")
            where = next((part for part in parts if part in _MINI_KINDS), "click")
            scene, steps = _MINI_KINDS[where]
            popup, confirm = parts.count("popup"), "confirm" in parts
            self.add(
                kind,
                partial(scene, popup=popup, confirm=confirm),
                instruction=scene.phrase,
                steps=steps + popup + confirm,
                split=split,
            )


class ComposedSuite(MiniSuite):
    """Every kind of `mini` behind no, one or two pop-ups, without and with a confirmation.

    All of them may be trained on; the suite measures which tasks are worth training on. A failure may take
    long, as in other suites: `slack` may be up to ten.
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
    kinds: Mapping[str, Split] = {}
    lags = range(1, 7)

    def __init__(self) -> None:
        super().__init__()
        for lag in self.lags:
            self.add(
                str(lag),
                partial(mini.RecallScene, lag=lag),
                instruction=mini.RecallScene.phrase,
                steps=mini.MOST_BEFORE + lag + 1,
                tier=lag + 1,
            )


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


class DeskSuite(EmbeddedSuite):
    """Lettered applications: forms, lists, settings, a file manager."""

    name = "desk"
    size = (448, 336)
    max_scale = 1.6
    slack = 5
    most_slack = 5
    themes = DESK_THEMES
    templates: Templates = _DESK

    def __init__(self) -> None:
        super().__init__()
        for kind, (scene, steps, split) in self.templates.items():
            self.add(
                kind,
                scene,
                instruction="{instruction}",
                steps=steps,
                split=split,
                params=self.params_of(kind),
            )

    @staticmethod
    def params_of(_: str) -> Mapping[str, str]:
        """Return the `params` of the task of that kind."""
        return {}


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
    def params_of(kind: str) -> Mapping[str, str]:
        """Return the application that a task of that kind is about."""
        return {"application": kind.partition("-")[0]}
