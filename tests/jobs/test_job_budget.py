"""What workers are allowed of a budget, and what comes back."""

from __future__ import annotations

from batchmill.jobs.pools.job_budget import JobBudget
from batchmill.wire.messages import Allow, Spending


def asking(usd: float, *, allowances_seen: int, returned: float = 0.0, reserved: int = 0) -> Spending:
    return Spending("job", returned, usd, reserved, 0, 0.0, allowances_seen, False)


def test_a_smaller_budget_is_taken_back() -> None:
    """Where a budget is made smaller than what workers have, they are told to give back what no row has reserved: each
    time, and no more goes out before there is some."""
    sent: list[Allow] = []
    job_budget = JobBudget("job", 100.0, 0.0)
    job_budget.open("w", sent.append)
    job_budget.report("w", asking(1.0, allowances_seen=1))
    allowed = sent[-1].usd
    assert allowed == 50.0
    job_budget.amend(12.0)
    assert sent[-1] == Allow("job", 0.0, True)
    job_budget.report("w", asking(0.0, allowances_seen=3, returned=40.0, reserved=10))
    assert job_budget.free == 2.0
    job_budget.amend(5.0)
    assert (len(sent), sent[-1]) == (4, Allow("job", 0.0, True))
    job_budget.report("w", asking(1.0, allowances_seen=4))
    assert len(sent) == 4 and job_budget.free == -5.0
    job_budget.amend(20.0)
    assert sent[-1].usd >= 1.0
