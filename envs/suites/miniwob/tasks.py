"""The tasks of suite `miniwob`: their ids, limits, paces and thresholds.

The page itself gives the instruction.

Seeds from FIRST_TEST_SEED on are for evaluation. With these, pages that have separate test instances (the
`-transfer` tasks and some more) draw from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from envs.contract.base import Task

FIRST_TEST_SEED = 1_000_000

PAGES: Mapping[int, str] = {
    1: """
        buy-ticket circle-center click-button click-color click-dialog click-dialog-2 click-link
        click-shape click-test click-test-2 click-test-transfer click-widget count-shape
        count-sides find-midpoint focus-text focus-text-2 grid-coordinate hot-cold
        identify-shape tic-tac-toe unicode-test
    """,
    2: """
        bisect-angle button-delay choose-list click-button-sequence click-collapsible
        click-collapsible-nodelay click-option click-pie click-pie-nodelay click-tab click-tab-2
        click-tab-2-easy click-tab-2-medium drag-box drag-circle drag-items drag-items-grid
        drag-shapes-2 drag-single-shape draw-circle draw-line email-inbox-delete
        email-inbox-important enter-date enter-time generate-number highlight-text
        highlight-text-2 moving-items navigate-tree resize-textarea right-angle scroll-text-2
        simple-algebra simple-arithmetic stock-market use-slider visual-addition
    """,
    3: """
        click-checkboxes click-collapsible-2 click-collapsible-2-nodelay click-menu
        click-menu-2 click-scroll-list click-tab-2-hard copy-paste daily-calendar drag-cube
        enter-text enter-text-2 enter-text-dynamic find-greatest find-word odd-or-even phone-book
        read-table scroll-text sign-agreement social-media text-editor text-transform
        use-autocomplete use-autocomplete-nodelay use-colorwheel use-colorwheel-2
    """,
    5: """
        ascending-numbers choose-date-easy choose-date-medium click-checkboxes-soft
        click-checkboxes-transfer click-shades copy-paste-2 drag-shapes drag-sort-numbers
        email-inbox email-inbox-forward email-inbox-forward-nl email-inbox-forward-nl-turk
        email-inbox-nl-turk email-inbox-noscroll email-inbox-reply email-inbox-star-reply
        enter-password form-sequence form-sequence-2 form-sequence-3 login-user login-user-popup
        multi-layouts multi-orderings order-food read-table-2 search-engine simon-says
        social-media-some terminal use-slider-2
    """,
    12: """
        book-flight book-flight-nodelay choose-date choose-date-nodelay click-checkboxes-large
        guess-number number-checkboxes social-media-all use-spinner
    """,
}
"""Approximate number of steps of a solution -> the pages whose solutions take so many."""

LEFT_OUT: Mapping[str, str] = {
    "chase-circle": "a pointer that entered the circle once and then waits long counts as following it",
    "hover-shape": "its page never ends an episode and gives no reward",
}
"""Pages of the package that are not used as tasks -> the reason."""

STEP_LIMITS: Mapping[str, int] = {
    "generate-number": 14,  # a try is right with probability 0.45 to 0.7; one seed of 50 takes more than 6
    "hot-cold": 25,  # a binary search takes 3 to 14 steps
    "moving-items": 24,  # the page ends after 9.9 s, which are 19 steps
    "stock-market": 24,  # the price at which one may buy comes within 7.6 s, which are 16 steps
}
"""Steps after which an episode is cut off, for pages whose limit does not follow from PAGES."""


class Pace(NamedTuple):
    """The time of the first screenshot, and how far the clock advances at each step, even for a wait."""

    settle_ms: float
    step_ms: float


PACES: Mapping[str, Pace] = {
    # From 600 ms on, a button lights up for 250 ms every 600 ms, so that each screenshot shows one of them.
    "simon-says": Pace(700, 600),
}
"""Paces of pages that show something for less than a step; there `step_ms` and the seconds of a wait are
ignored."""

THRESHOLDS: Mapping[str, float] = {
    "bisect-angle": 0.9,
    "circle-center": 0.9,
    "find-midpoint": 0.9,
    "moving-items": 0.78,  # nine circles of ten
    "right-angle": 0.9,
    "use-colorwheel": 0.9,
    "use-colorwheel-2": 0.9,
}
"""Page with partial rewards -> the raw reward that passes; all other pages need 1.0."""

PARTIAL = frozenset(
    """
    ascending-numbers bisect-angle button-delay circle-center click-checkboxes click-checkboxes-large
    click-checkboxes-soft click-checkboxes-transfer drag-shapes-2 draw-circle draw-line find-greatest
    find-midpoint hot-cold moving-items odd-or-even phone-book right-angle use-colorwheel
    use-colorwheel-2
    """.split()
)
"""Pages that may end with a raw reward above 0 and below the threshold. On these the published metric, by
which any reward above 0 passes, differs."""

NO_ORACLE: Mapping[str, str] = {
    "book-flight": "a form, then a page of flights: not written",
    "book-flight-nodelay": "as book-flight",
    "click-checkboxes-soft": "which words mean the same is not in the page's DOM",
    "count-sides": "drawn on a canvas: the answer has to be seen",
    "daily-calendar": "several drags and a dialog: not written",
    "drag-cube": "turned by transforms, of which the page keeps the sum: not written",
    "email-inbox-forward-nl": "the instruction is in free words",
    "email-inbox-forward-nl-turk": "as email-inbox-forward-nl",
    "email-inbox-nl-turk": "as email-inbox-forward-nl",
    "hot-cold": "the place is nowhere in the DOM: it takes a search, which remembers",
    "simon-says": "the lights have to be remembered",
    "text-editor": "an editor of a library's own: not written",
    "tic-tac-toe": "wants a game won against a random opponent, which no action forces",
}
"""Pages without a solver in oracle.js and the two files beside it -> the reason."""

RELOADED = frozenset(
    """
    book-flight book-flight-nodelay choose-date choose-date-easy choose-date-medium
    choose-date-nodelay click-collapsible click-collapsible-2 click-collapsible-2-nodelay
    click-collapsible-nodelay click-dialog-2 click-pie click-pie-nodelay click-scroll-list
    click-shape click-tab click-tab-2 click-tab-2-easy click-tab-2-hard click-tab-2-medium
    copy-paste-2 daily-calendar form-sequence moving-items scroll-text-2 sign-agreement simon-says
    social-media-all use-colorwheel use-colorwheel-2 use-slider-2
    """.split()
)
"""Pages that keep state from one episode to the next, so that they are loaded again for each episode."""


def _tasks() -> Iterator[Task]:
    steps_of = {page: steps for steps, pages in PAGES.items() for page in pages.split()}
    for page, steps in sorted(steps_of.items()):
        yield Task(
            f"miniwob/{page}",
            "miniwob",
            "{instruction}",
            max_steps=STEP_LIMITS.get(page, 2 * steps + 3),
            tier=steps,
            params={
                "page": page,
                "threshold": THRESHOLDS.get(page, 1.0),
                "reload": page in RELOADED,
                "pace": PACES.get(page),
            },
        )


TASKS: Mapping[str, Task] = {task.id: task for task in _tasks()}
"""The tasks by id: `miniwob/` and the name of the page."""
