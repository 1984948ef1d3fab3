"""Promises of suite `miniwob` towards what others run on the same pages: seeds, dates, verdicts.

The real browser plays; where it or the package is not installed, these tests are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bus.errors import MissingPartError
from envs.contract.actions import Click
from envs.suites.miniwob.env import MiniwobEnv, MiniwobSuite
from envs.tools.browser.process import find_chromium
from envs.tools.miniwob_pages import find_pages

try:
    find_chromium()
    find_pages()
except MissingPartError as missing:
    pytest.skip(str(missing), allow_module_level=True)

FARAMA: dict[str, dict[int, str]] = {
    "click-button": {0: 'Click on the "okay" button.', 123456: 'Click on the "ok" button.'},
    "click-checkboxes": {
        0: "Select HF2 and click Submit.",
        7: "Select 6hvqq, ky7, F01Kwi and click Submit.",
    },
    "choose-date": {
        0: "Select 01/14/2016 as the date and hit submit.",
        7: "Select 07/02/2016 as the date and hit submit.",
    },
    "email-inbox": {
        7: 'Find the email by Othilie and reply to them with the text "Est. Sit. Nisl.".'
    },
    "enter-text": {123456: 'Enter "Kanesha" into the text field and press Submit.'},
}
"""Instructions of Farama's `reset(seed=n)`, by page and n: what the statements of its SeleniumInstance
(endEpisode, `Math.seedrandom(n)`, setDataMode, startEpisodeReal) gave in Chromium without our script."""


@pytest.fixture(scope="module")
def env() -> Iterator[MiniwobEnv]:
    instance = MiniwobSuite().make_env()
    yield instance
    instance.close()


@pytest.mark.parametrize("page", FARAMA)
def test_a_seed_draws_the_instance_that_faramas_reset_draws(env: MiniwobEnv, page: str) -> None:
    for seed, instruction in FARAMA[page].items():
        assert env.reset(seed=seed, options={"task": f"miniwob/{page}"})[1] == {
            "instruction": instruction
        }


@pytest.mark.parametrize(
    "page", ["choose-date", "choose-date-easy", "choose-date-medium", "choose-date-nodelay"]
)
def test_the_date_picker_opens_in_december(env: MiniwobEnv, page: str) -> None:
    env.reset(seed=0, options={"task": f"miniwob/{page}"})
    action = env.oracle_action()
    assert isinstance(action, Click)
    env.step(action)
    assert env._page is not None
    assert (
        env._page.evaluate("document.querySelector('.ui-datepicker-month').textContent")
        == "December"
    )
