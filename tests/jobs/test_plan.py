"""The plan on disk: file order, shards, the reader, and damage."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from written_dataset import RowKeys, Written, write_dataset

from batchmill.errors import LedgerBroken
from batchmill.jobs.ledger import plan
from batchmill.jobs.ledger.plan import (
    FOLLOWERS,
    ORDER,
    PLAN,
    PlanOrder,
    PlanReader,
    ShardRows,
    explain,
    make,
)
from batchmill.jobs.ledger.shards import LAST_SHARDS

ONE_MODEL = PlanOrder(targets=[(0, None)], shard_rows=[ShardRows(4)])


def quiet(_: float) -> None:
    """Take progress and do nothing with it."""


def make_plan(written: Written, order: PlanOrder = ONE_MODEL) -> PlanReader:
    make(order, written.dataset, written.plan, quiet)
    return PlanReader(written.plan)


def rows_of(reader: PlanReader) -> list[int]:
    return list(reader.row_numbers(0, reader.leaders))


def test_file_order_needs_no_order_file(tmp_path):
    """A dataset without keys and without refused rows runs as the file has it, position and number being the same."""
    reader = make_plan(write_dataset(tmp_path, [RowKeys()] * 10, keys=False))
    assert reader.row_numbers(3, 7) == range(3, 7)
    assert not (reader.home / ORDER).exists()
    assert not reader.plan.permuted


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(0, 400), most=st.integers(1, 90), last=st.none() | st.integers(1, 90))
def test_shards_become_shorter_towards_the_end(tmp_path_factory, rows, most, last):
    """Shards cover all rows in order; with a `last` none is shorter than that but the final one, nor grows."""
    order = PlanOrder(targets=[(0, None)], shard_rows=[ShardRows(most, last)])
    written = write_dataset(tmp_path_factory.mktemp("shards"), [RowKeys()] * rows, keys=False)
    shards = list(make_plan(written, order).shards())
    edges = [0, *(shard.hi for shard in shards)]
    assert [shard.lo for shard in shards] == edges[:-1] and edges[-1] == rows
    lengths = [shard.hi - shard.lo for shard in shards]
    assert lengths == sorted(lengths, reverse=True) and all(length <= most for length in lengths)
    if last is None or last >= most:
        assert set(lengths[:-1]) <= {most}
    else:
        assert all(length >= last for length in lengths[:-1])
        if lengths:
            assert sum(lengths[-LAST_SHARDS:]) <= 4 * max(last, lengths[0]) and lengths[-1] <= last


def test_refused_rows_do_not_run(tmp_path):
    """Refused rows are left out and the others keep the file's order."""
    rows = [RowKeys(rejected=n in (0, 3, 4, 9)) for n in range(10)]
    reader = make_plan(write_dataset(tmp_path, rows, keys=False))
    assert rows_of(reader) == [1, 2, 5, 6, 7, 8]
    assert (reader.plan.leaders, reader.plan.rejected, reader.plan.followers) == (6, 4, 0)


@settings(deadline=None, max_examples=60)
@given(refused=st.sets(st.integers(0, 40)), rows=st.integers(0, 41), step=st.integers(1, 7))
def test_any_gaps(tmp_path_factory, refused, rows, step):
    """Whichever rows are refused and however many are handled at once, exactly the others run, in order."""
    kept = [n for n in range(rows) if n not in refused]
    written = write_dataset(
        tmp_path_factory.mktemp("gaps"), [RowKeys(rejected=n in refused) for n in range(rows)], keys=False
    )
    assert rows_of(make_plan(written, replace(ONE_MODEL, piece_rows=step))) == kept


def test_shards_cover_the_positions(tmp_path):
    """Shards have the rows they were given, the last one what is left, and numbers that run on."""
    reader = make_plan(write_dataset(tmp_path, [RowKeys()] * 10, keys=False))
    assert [(s.number, s.lo, s.hi, s.model) for s in reader.shards()] == [(0, 0, 4, 0), (1, 4, 8, 0), (2, 8, 10, 0)]


def test_an_empty_dataset_has_an_empty_plan(tmp_path):
    """No rows, no shards, no error."""
    reader = make_plan(write_dataset(tmp_path, [], keys=False))
    assert (reader.leaders, list(reader.shards()), list(reader.followers())) == (0, [], [])


def test_making_it_again_gives_the_same_bytes(tmp_path):
    """A crash while planning is harmless: the plan is a function of the dataset."""
    written = write_dataset(tmp_path, [RowKeys(rejected=n % 3 == 0) for n in range(50)], keys=False)
    make_plan(written)
    first = {path.name: path.read_bytes() for path in written.plan.iterdir()}
    (written.plan / f"{ORDER}.part").write_bytes(b"left by a crash")
    make_plan(written)
    assert {path.name: path.read_bytes() for path in written.plan.iterdir()} == first


@pytest.mark.parametrize("name", [ORDER, PLAN])
def test_damage_is_found(tmp_path, name):
    """A changed byte in any file of a plan is found by `check`."""
    reader = make_plan(write_dataset(tmp_path, [RowKeys(rejected=n == 2) for n in range(9)], keys=False))
    reader.check()
    data = (reader.home / name).read_bytes()
    changed = data.replace(b'"rows":9', b'"rows":8') if name == PLAN else bytes([data[0] ^ 1]) + data[1:]
    (reader.home / name).write_bytes(changed)
    with pytest.raises(LedgerBroken, match="checksum"):
        PlanReader(reader.home).check()


@pytest.mark.parametrize("name", [ORDER, FOLLOWERS])
def test_a_short_file_is_refused(tmp_path, name):
    """A plan whose files have the wrong size cannot be opened."""
    reader = make_plan(write_dataset(tmp_path, [RowKeys(rejected=n == 2) for n in range(9)], keys=False))
    path = reader.home / name
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(LedgerBroken, match="bytes instead of"):
        PlanReader(reader.home)


def test_a_missing_plan_is_said(tmp_path):
    """A folder without a plan is not a plan."""
    with pytest.raises(LedgerBroken, match="cannot be read"):
        PlanReader(tmp_path)


def test_refused_rows_must_add_up(tmp_path):
    """A list of refused rows that does not fit the seal stops the job."""
    written = write_dataset(tmp_path, [RowKeys(rejected=True)] * 3, keys=False)
    (written.dataset / "rejected.jsonl").write_text('{"row":0,"code":"a","message":""}\n')
    with pytest.raises(LedgerBroken, match="3 rows were refused, but 1"):
        make_plan(written)


def test_too_many_rows_are_refused(tmp_path, monkeypatch):
    """A dataset larger than row numbers go is refused before anything is written; one of just that size is not."""
    monkeypatch.setattr(plan, "ROWS_MAX", 3)
    (tmp_path / "fits").mkdir()
    (tmp_path / "large").mkdir()
    assert make_plan(write_dataset(tmp_path / "fits", [RowKeys()] * 3, keys=False)).leaders == 3
    with pytest.raises(LedgerBroken, match="more than a plan can number"):
        make_plan(write_dataset(tmp_path / "large", [RowKeys()] * 4, keys=False))


def test_explanation_of_file_order(tmp_path):
    """People see how many rows run, in how many shards, and that nothing is known of prefixes without keys."""
    reader = make_plan(write_dataset(tmp_path, [RowKeys(rejected=n == 2) for n in range(9)], keys=False))
    result = explain(reader.plan, ["m"])
    assert (result.rows, result.run, result.folded, result.rejected, result.shards) == (9, 8, 0, 1, 2)
    assert (result.tokens, result.shared_prefix, result.groups[0].model, result.groups[0].shards) == (
        None,
        None,
        "m",
        2,
    )


def test_reading_a_plan_loads_no_numpy():
    """Workers read plans and stay lean."""
    code = "import sys, batchmill.jobs.ledger.plan; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
