"""The file manager: folders, selection, open, rename, delete, new folder, cut, copy and paste."""

# ruff: noqa: D102 - overrides keep the contract that the base class documents
from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from random import Random
from typing import ClassVar, Literal

from envs.contract.actions import Action
from envs.contract.base import Verdict
from envs.suites.embedded.app import App, Layer
from envs.suites.embedded.controls import Button, ListRow, ScrollView
from envs.suites.embedded.draw import Rect
from envs.suites.embedded.menus import Entry, context_menu, dialog
from envs.suites.embedded.scene import NOT_YET, REACHED
from envs.suites.embedded.tasks import words
from envs.suites.embedded.tasks.desk import DeskScene, fill, finish, reach
from envs.suites.embedded.textfield import TextField
from envs.suites.embedded.widgets import (
    EventHandler,
    Label,
    Panel,
    Pointer,
    Ui,
    Widget,
    column,
    row,
)

Tree = dict[str, "Tree | None"]
"""The entries of a folder by name: a Tree for a folder, None for a file."""

Path = tuple[str, ...]


def folder_at(tree: Tree, path: Path) -> Tree:
    """Return the folder at `path`. Raises KeyError if there is none."""
    for name in path:
        below = tree[name]
        if below is None:
            raise KeyError(name)
        tree = below
    return tree


def differences(tree: Tree, goal: Tree, where: str = "") -> list[str]:
    """Return the differences between `tree` and `goal`, in words."""
    changes = []
    for name in sorted({*tree, *goal}):
        path = f"{where}/{name}"
        if name not in tree:
            changes.append(f"{path} is missing")
        elif name not in goal:
            changes.append(f"{path} should not be there")
        else:
            here, there = tree[name], goal[name]
            if here is not None and there is not None:
                changes += differences(here, there, path)
            elif here is not there:
                changes.append(f"{path} is of the wrong kind")
    return changes


class FilesScene(DeskScene):
    """A file manager on a small tree of folders."""

    title = "Files"
    units = (424, 290)

    def __init__(self, rng: Random, ui: Ui) -> None:
        self.path: Path = ()
        self.selected: str | None = None
        self.clipped: tuple[Literal["cut", "copy"], Path, str] | None = None
        self.asking: Literal["", "rename", "new", "delete", "exists"] = ""
        self.draft = ""
        self.context: tuple[int, int] | None = None
        self.tree: Tree = _random_tree(rng)
        self.goal: Tree = {}
        super().__init__(rng, ui)

    def set_up(self) -> None:
        self.goal = copy.deepcopy(self.tree)
        self.plan()

    def plan(self) -> None:
        """Draw the goal and its instruction from the seeded generator."""
        raise NotImplementedError

    @property
    def here(self) -> Tree:
        """The folder that is shown."""
        return folder_at(self.tree, self.path)

    def some_folder(self) -> str:
        """Return a folder of the top level."""
        return self.rng.choice([name for name, below in self.tree.items() if below is not None])

    def some_file(self, path: Path) -> str:
        """Return a file in the folder at `path`."""
        folder = folder_at(self.tree, path)
        return self.rng.choice([name for name, below in folder.items() if below is None])

    def evaluate(self) -> Verdict:
        wrong = differences(self.tree, self.goal)
        return Verdict("fail", wrong[0]) if wrong else REACHED

    # --- the screen -------------------------------------------------------------------------

    def body(self) -> Widget:
        theme, has_selection = self.ui.theme, self.selected is not None
        bar = row(
            Button("up", "Up", self._up, enabled=bool(self.path), pad=7),
            Button("new", "New folder", partial(self._ask, "new"), pad=7),
            Button("rename", "Rename", partial(self._ask, "rename"), enabled=has_selection, pad=7),
            Button("delete", "Delete", partial(self._ask, "delete"), enabled=has_selection, pad=7),
            Button("cut", "Cut", partial(self._hold, "cut"), enabled=has_selection, pad=7),
            Button("copy", "Copy", partial(self._hold, "copy"), enabled=has_selection, pad=7),
            Button("paste", "Paste", self._paste, enabled=self.clipped is not None, pad=7),
            gap=4,
        )
        top = Panel(bar, fill=theme.panel, pad=6)
        where = Panel(Label("  /  ".join(("Home", *self.path))), fill=theme.field, pad=5)
        rows = [self._row(name, below) for name, below in sorted_entries(self.here)]
        listing: Widget = (
            column(*rows, gap=0) if rows else Label("  This folder is empty.", muted=True)
        )
        view = ScrollView("listing", listing)
        count = Label(f"  {len(rows)} items", muted=True)
        foot = Panel(count, fill=theme.panel, pad=2)
        area = Area("area", view, on_menu=self._menu, on_press=self._deselect)
        return column(top, where, area, foot, gap=0, grow=[area])

    def _row(self, name: str, below: Tree | None) -> ListRow:
        folder = below is not None
        return ListRow(
            f"entry.{name}",
            name,
            partial(self._select, name),
            note="Folder" if folder else name.rpartition(".")[2].upper() + " file",
            icon="folder" if folder else "file",
            selected=name == self.selected,
            on_open=partial(self._open, name) if folder else None,
            on_menu=self._menu,
            on_drop=partial(self._drop, name) if folder else None,
        )

    def above(self) -> list[Layer]:
        ui = self.ui
        if self.context is not None:
            has_selection = self.selected is not None
            entries = [
                Entry("menu.rename", "Rename", partial(self._ask, "rename"), has_selection),
                Entry("menu.delete", "Delete", partial(self._ask, "delete"), has_selection),
                Entry("menu.cut", "Cut", partial(self._hold, "cut"), has_selection),
                Entry("menu.copy", "Copy", partial(self._hold, "copy"), has_selection),
                Entry("menu.paste", "Paste", self._paste, self.clipped is not None),
                Entry("menu.new", "New folder", partial(self._ask, "new")),
            ]
            return [context_menu(ui, entries, self.context, self._close_context)]
        if not self.asking:
            return []
        body: Widget
        buttons: list[tuple[str, str, EventHandler]] = [("cancel", "Cancel", self._cancel)]
        if self.asking == "exists":
            title, body = "Not possible", Label("That name is taken or empty.")
            buttons = [("ok", "OK", self._cancel)]
        elif self.asking == "delete":
            title, body = "Delete", Label(f"Delete {self.selected} for good?")
            buttons.append(("ok", "Delete", self._delete))
        else:
            title = "Rename" if self.asking == "rename" else "New folder"
            field = TextField("name", self.draft, self._write, width=180, on_enter=self._accept)
            body = row(Label("Name"), field)
            buttons.append(
                ("ok", title.split()[0] if title == "Rename" else "Create", self._accept)
            )
        layer = dialog(ui, "ask", title, body, buttons, on_close=self._cancel, over=self.window)
        return [layer]

    # --- handlers ---------------------------------------------------------------------------

    def _select(self, name: str) -> None:
        self.selected = name

    def _deselect(self) -> None:
        self.selected = None

    def _open(self, name: str) -> None:
        self.path, self.selected = (*self.path, name), None
        self.ui.offsets.pop("listing", None)

    def _up(self) -> None:
        self.path, self.selected = self.path[:-1], None
        self.ui.offsets.pop("listing", None)

    def _ask(self, what: Literal["", "rename", "new", "delete", "exists"]) -> None:
        if what in ("rename", "delete") and self.selected is None:
            return
        self.asking = what
        self.draft = self.selected or "" if what == "rename" else ""
        if what in ("rename", "new"):  # the dialog opens ready to type, all selected
            self.ui.focus, self.ui.anchor, self.ui.caret = "name", 0, len(self.draft)

    def _cancel(self) -> None:
        self.asking = ""

    def _write(self, text: str) -> None:
        self.draft = text

    def _accept(self) -> None:
        name, folder = self.draft.strip(), self.here
        if not name or "/" in name or (name in folder and name != self.selected):
            self.asking = "exists"
            return
        if self.asking == "new":
            if name in folder:
                self.asking = "exists"
                return
            folder[name] = {}
        elif self.selected is not None:
            folder[name] = folder.pop(self.selected)
        self.selected, self.asking = name, ""

    def _delete(self) -> None:
        if self.selected is not None:
            del self.here[self.selected]
        self.selected, self.asking = None, ""

    def _hold(self, how: Literal["cut", "copy"]) -> None:
        if self.selected is not None:
            self.clipped = (how, self.path, self.selected)

    def _paste(self) -> None:
        if self.clipped is None:
            return
        how, path, name = self.clipped
        self._transfer(how, path, name, self.path)

    def _transfer(self, how: str, source: Path, name: str, target: Path) -> None:
        """Move or copy an entry into the folder at `target`; show an error if that is not possible."""
        inside = target[: len(source) + 1] == (*source, name)
        try:
            origin, folder = folder_at(self.tree, source), folder_at(self.tree, target)
        except KeyError:
            origin, folder = {}, {}
        if inside or name not in origin or name in folder:
            self.asking = "exists"
            return
        folder[name] = copy.deepcopy(origin[name])
        if how == "cut":
            del origin[name]
            self.clipped = None
        self.selected = name if target == self.path else None

    def _drop(self, onto: str, dragged: str) -> None:
        name = dragged.removeprefix("entry.")
        if name in self.here and name != onto:
            self._transfer("cut", self.path, name, (*self.path, onto))

    def _menu(self, x: int, y: int) -> None:
        self.context = (x, y)

    def _close_context(self) -> None:
        self.context = None

    # --- the oracle's moves -----------------------------------------------------------------

    def go(self, app: App, path: Path) -> Action | None:
        """Return the next action towards the folder at `path`; None if it is shown."""
        if self.path == path:
            return None
        if self.path == path[: len(self.path)]:
            return reach(app, f"entry.{path[len(self.path)]}", double=True)
        return reach(app, "up")

    def take(self, app: App, path: Path, name: str) -> Action | None:
        """Return the next action towards selecting `name`; None if it is selected."""
        away = self.go(app, path)
        if away is not None:
            return away
        return None if self.selected == name else reach(app, f"entry.{name}")

    def enter_name(self, app: App, name: str) -> Action:
        """Return the next action in a dialog that asks for a name."""
        return fill(app, "name", name) or reach(app, "ask.ok")


class Area(Widget):
    """The area of the listing: a press beside the entries deselects them, a right click opens the menu."""

    clickable = True

    def __init__(
        self,
        name: str,
        child: Widget,
        *,
        on_menu: Callable[[int, int], None],
        on_press: EventHandler,
    ) -> None:
        super().__init__(name, children=[child])
        self.on_menu = on_menu
        self.on_press = on_press

    def arrange(self, ui: Ui, clip: Rect) -> None:
        self.children[0].place(ui, self.bbox, clip)

    def press(self, ui: Ui, pointer: Pointer) -> None:  # noqa: ARG002
        self.on_press()
        if pointer.button == "right":
            self.on_menu(pointer.x, pointer.y)


def sorted_entries(folder: Tree) -> list[tuple[str, Tree | None]]:
    """Return the entries of a folder: first folders, then files, each by name."""
    return sorted(folder.items(), key=lambda item: (item[1] is None, item[0].lower()))


def _random_tree(rng: Random) -> Tree:
    """Return three to four folders with two to four files each, and two to four files beside them."""
    stems = rng.sample(words.FILE_STEMS, len(words.FILE_STEMS))

    def files(count: int) -> Tree:
        return {stems.pop() + rng.choice(words.FILE_ENDINGS): None for _ in range(count)}

    folders = rng.sample(words.FOLDERS, rng.randint(3, 4))
    tree: Tree = {name: files(rng.randint(2, 4)) for name in folders}
    tree.update(files(rng.randint(2, 4)))
    return tree


class OpenScene(FilesScene):
    """Go into a folder and select a file."""

    def plan(self) -> None:
        self.folder = self.some_folder()
        self.file = self.some_file((self.folder,))
        self.instruction = f"Open the folder {self.folder} and select {self.file}."

    def evaluate(self) -> Verdict:
        wrong = super().evaluate()
        if wrong.outcome != "pass":
            return wrong
        there = self.path == (self.folder,) and self.selected == self.file
        return REACHED if there else NOT_YET

    def solve(self, app: App) -> Action:
        return self.take(app, (self.folder,), self.file) or finish(app)


class DeskDeleteScene(FilesScene):
    """Delete a file of the top folder or of a folder below."""

    def plan(self) -> None:
        folder = self.some_folder()
        self.where: Path = (folder,) if self.rng.random() < 0.5 else ()
        self.file = self.some_file(self.where)
        del folder_at(self.goal, self.where)[self.file]
        place = f" from the folder {folder}" if self.where else ""
        self.instruction = f"Delete {self.file}{place}."

    def solve(self, app: App) -> Action:
        if self.tree == self.goal:
            return finish(app)
        if self.asking == "delete" and self.selected == self.file and self.path == self.where:
            return reach(app, "ask.ok")
        if self.asking:
            return finish(app)
        return self.take(app, self.where, self.file) or reach(app, "delete")


class RenameScene(FilesScene):
    """Rename a file or a folder of the top folder."""

    def plan(self) -> None:
        if self.rng.random() < 0.5:
            self.old = self.some_file(())
            ending = "." + self.old.rpartition(".")[2]
            free = [stem for stem in words.FILE_STEMS if f"{stem}{ending}" not in self.tree]
            self.new = self.rng.choice(free) + ending
        else:
            self.old = self.some_folder()
            self.new = self.rng.choice([name for name in words.FOLDERS if name not in self.tree])
        self.goal[self.new] = self.goal.pop(self.old)
        self.instruction = f"Rename {self.old} to {self.new}."

    def solve(self, app: App) -> Action:
        if self.tree == self.goal:
            return finish(app)
        if self.asking == "rename" and self.selected == self.old:
            return self.enter_name(app, self.new)
        if self.asking:
            return finish(app)
        return self.take(app, (), self.old) or reach(app, "rename")


class NewFolderScene(FilesScene):
    """Make a folder, in the top folder or in a folder below."""

    def plan(self) -> None:
        folder = self.some_folder()
        self.where: Path = (folder,) if self.rng.random() < 0.5 else ()
        self.name = self.rng.choice([name for name in words.FOLDERS if name not in self.tree])
        folder_at(self.goal, self.where)[self.name] = {}
        place = f" in the folder {folder}" if self.where else ""
        self.instruction = f"Make a new folder {self.name}{place}."

    def solve(self, app: App) -> Action:
        if self.tree == self.goal:
            return finish(app)
        if self.asking == "new" and self.path == self.where:
            return self.enter_name(app, self.name)
        if self.asking:
            return finish(app)
        return self.go(app, self.where) or reach(app, "new")


class MoveScene(FilesScene):
    """Move a file of the top folder into a folder."""

    how: ClassVar[Literal["cut", "copy"]] = "cut"
    verb: ClassVar[str] = "Move"

    def plan(self) -> None:
        self.file = self.some_file(())
        self.folder = self.some_folder()
        target = folder_at(self.goal, (self.folder,))
        target[self.file] = self.goal.pop(self.file) if self.how == "cut" else None
        self.instruction = f"{self.verb} {self.file} into the folder {self.folder}."

    def solve(self, app: App) -> Action:
        if self.tree == self.goal:
            return finish(app)
        if self.asking:
            return finish(app)
        if self.clipped != (self.how, (), self.file):
            return self.take(app, (), self.file) or reach(app, self.how)
        return self.go(app, (self.folder,)) or reach(app, "paste")


class CopyScene(MoveScene):
    """Copy a file of the top folder into a folder."""

    how = "copy"
    verb = "Copy"


class TidyScene(FilesScene):
    """Make a folder and move a file into it."""

    def plan(self) -> None:
        self.file = self.some_file(())
        self.name = self.rng.choice([name for name in words.FOLDERS if name not in self.tree])
        del self.goal[self.file]
        self.goal[self.name] = {self.file: None}
        self.instruction = f"Make a new folder {self.name} and move {self.file} into it."

    def solve(self, app: App) -> Action:
        if self.tree == self.goal:
            return finish(app)
        if self.asking == "new" and self.path == ():
            return self.enter_name(app, self.name)
        if self.asking:
            return finish(app)
        if self.name not in self.tree:
            return self.go(app, ()) or reach(app, "new")
        if self.clipped != ("cut", (), self.file):
            return self.take(app, (), self.file) or reach(app, "cut")
        return self.go(app, (self.name,)) or reach(app, "paste")
