"""Suite `apps`: the tasks of the applications with many screens."""

from __future__ import annotations

from collections.abc import Mapping

from envs.base import Split, Task
from envs.embedded.apps import centre, mail, shop
from envs.embedded.env import EmbeddedEnv
from envs.embedded.scene import SceneFactory
from envs.embedded.suites import DESK_SLACK, DeskSuite
from envs.embedded.theme import DESK_THEMES
from envs.options import Count, ImageEncoding, Size, checked

APPS: dict[str, tuple[SceneFactory, int, Split]] = {
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
"""Template -> scene, the most steps that its shortest solution takes, split."""


class AppsSuite:
    """A mail client, a shop and a settings centre: many screens each, for tasks and for exploring."""

    name = "apps"
    size = DeskSuite.size

    def __init__(self) -> None:
        self.scenes: Mapping[str, SceneFactory] = {
            f"{self.name}/{kind}": scene for kind, (scene, _, _) in APPS.items()
        }
        self.tasks: Mapping[str, Task] = {
            f"{self.name}/{kind}": Task(
                f"{self.name}/{kind}",
                self.name,
                "{instruction}",
                max_steps=steps + DESK_SLACK,
                tier=steps,
                split=split,
                params={"application": kind.partition("-")[0]},
            )
            for kind, (_, steps, split) in APPS.items()
        }

    @checked
    def make_env(
        self,
        *,
        size: Size = size,
        encoding: ImageEncoding = "png",
        slack: Count = DESK_SLACK,
    ) -> EmbeddedEnv:
        """An environment of `size` pixels: (width, height) or "448x336", in PNG or JPEG."""
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
