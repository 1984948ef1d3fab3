"""Messages from an environment that are not consistent are refused before they are filed."""

from __future__ import annotations

import pytest

from bus.errors import ProtocolError
from bus.messages import (
    VersionSpan,
)
from dart_cli.data.ledger import Ledger
from dart_cli.data.store.writer import Store
from tests.altered import altered
from tests.data.parts import (
    ask_lease,
    state_of,
    step_record,
    trajectory_end,
)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"behaviour_logprobs": [-1.0]}, "behaviour_logprobs"),
        ({"behaviour_logprobs": [-1.0, float("-inf"), -1.0]}, "behaviour_logprobs must be finite"),
        ({"entropies": []}, "entropies"),
        ({"entropies": [0.1, float("nan"), 0.1]}, "entropies must be finite"),
        ({"version_spans": []}, "version_spans"),
        ({"version_spans": [VersionSpan(version=0, start=1, end=3)]}, "version_spans"),
        ({"version_spans": [VersionSpan(version=-1, start=0, end=3)]}, "version_spans"),
        ({"token_ids": [1, 2, 2**31]}, "token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"prompt_token_ids": []}, "must not be empty"),
        (
            {"token_ids": [], "behaviour_logprobs": [], "entropies": [], "version_spans": []},
            "must not be empty",
        ),
        ({"step": -1}, "step"),
        ({"model_s": float("nan")}, "times"),
        ({"image_hashes": []}, "image_hashes"),
        ({"screenshot": b"another"}, "image_hashes"),
    ],
)
def test_a_step_whose_parts_do_not_fit_is_refused_by_name(
    ledger: Ledger, store: Store, change: dict[str, object], named: str
) -> None:
    lease = ask_lease(ledger, 0)
    with pytest.raises(ProtocolError, match=named):
        ledger.step(altered(step_record(lease.trajectory_id, 0), **change))
    assert store.steps(lease.trajectory_id) == []


@pytest.mark.parametrize("change", [{"steps": 2**40}, {"steps": -1}, {"wall_s": float("inf")}])
def test_an_impossible_end_is_refused_and_the_lease_goes_on(
    ledger: Ledger, store: Store, change: dict[str, object]
) -> None:
    lease = ask_lease(ledger, 0)
    with pytest.raises(ProtocolError, match=lease.trajectory_id):
        ledger.end(trajectory_end(lease.trajectory_id, 0).model_copy(update=change))
    assert state_of(store, lease.trajectory_id) == "leased"
