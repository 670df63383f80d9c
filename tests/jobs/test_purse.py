"""What workers are allowed of a budget, and what comes back."""

from __future__ import annotations

from batchmill.jobs.purse import Purse
from batchmill.wire.messages import Allow, Spending


def asking(usd: float, *, heard: int, returned: float = 0.0, reserved: int = 0) -> Spending:
    return Spending("job", returned, usd, reserved, 0, 0.0, heard, False)


def test_a_smaller_budget_is_taken_back() -> None:
    """Where a budget is made smaller than what workers have, they are told to give back what no row has reserved: each
    time, and no more goes out before there is some."""
    sent: list[Allow] = []
    purse = Purse("job", 100.0, 0.0)
    purse.open("w", sent.append)
    purse.hear("w", asking(1.0, heard=1))
    allowed = sent[-1].usd
    assert allowed == 50.0
    purse.amend(12.0)
    assert sent[-1] == Allow("job", 0.0, True)
    purse.hear("w", asking(0.0, heard=3, returned=40.0, reserved=10))
    assert purse.free == 2.0
    purse.amend(5.0)
    assert (len(sent), sent[-1]) == (4, Allow("job", 0.0, True))
    purse.hear("w", asking(1.0, heard=4))
    assert len(sent) == 4 and purse.free == -5.0
    purse.amend(20.0)
    assert sent[-1].usd >= 1.0
