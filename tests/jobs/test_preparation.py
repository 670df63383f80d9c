"""Sealing and planning as the owner's child does it."""

from __future__ import annotations

import json

import msgspec
import pytest
from datasets.killed_validators import kill_pools

from batchmill.errors import InvalidDataset
from batchmill.jobs.intake.preparation import Prepared, PrepareOrder, prepare
from batchmill.types import DatasetSpec, ModelSpec, Policy
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import TableForm

ROWS = 30_000


@pytest.fixture
def order(tmp_path) -> bytes:
    """To prepare a dataset that is large enough for validators."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"n": n, "text": "x" * 40}) + "\n" for n in range(ROWS)))
    spec = JobSpec(
        id="job_1", dataset=DatasetSpec([str(tmp_path / "in.jsonl")]), models=[ModelSpec("m", "function", "a.py:f")],
        form=TableForm(), policy=Policy(), output=None, identity="", code={}, created=0.0,
    )  # fmt: skip
    folders = [tmp_path / name for name in ("dataset", "plan")]
    for folder in folders:
        folder.mkdir()
    return msgspec.json.encode(PrepareOrder(spec, *map(str, folders)))


@pytest.mark.parametrize("kills", [1, 2])
def test_a_validator_that_was_killed(order, monkeypatch, kills):
    """The dataset is read anew where a validator was killed, once: a line that always kills is an error."""
    pools = kill_pools(monkeypatch, kills)
    if kills == 1:
        assert msgspec.json.decode(prepare(order, lambda _: None), type=Prepared).plan.rows == ROWS
    else:
        with pytest.raises(InvalidDataset, match="signal 9"):
            prepare(order, lambda _: None)
    assert len(pools) == 2
