"""Plans over keys: order, folding, groups."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from written_dataset import RowKeys, Written, write_dataset

from batchmill.errors import LedgerBroken
from batchmill.jobs.ledger.plan import FOLLOWERS, ORDER, PlanOrder, PlanReader, ShardRows, explain, make

TARGETS = [(1, None), (0, "upper"), (0, None), (0, "lower"), (1, None)]
KEYED = PlanOrder(targets=TARGETS, shard_rows=[ShardRows(3), ShardRows(5)], keys=True)
SECOND_KEEPS_ORDER = replace(KEYED, file_order=[1])
ONE = PlanOrder(targets=[(0, None)], shard_rows=[ShardRows(100)], keys=True)

row_keys = st.builds(
    RowKeys,
    target=st.integers(0, len(TARGETS) - 1),
    prefix=st.sampled_from([0, 1, 2**59, 2**60 - 1, 5 << 30]),
    cost=st.integers(1, 4),
    fold=st.just((0, 0)),
    rejected=st.booleans(),
)
folds = st.lists(st.sampled_from([(0, 0), (1, 0), (0, 1), (1, 1), (7, 8)]), max_size=60)


def quiet(_: float) -> None:
    """Take progress and do nothing with it."""


def make_plan(written: Written, order: PlanOrder = KEYED) -> PlanReader:
    make(order, written.dataset, written.plan, quiet)
    return PlanReader(written.plan)


def rows_of(reader: PlanReader) -> list[int]:
    return list(reader.row_numbers(0, reader.leaders))


def with_folds(rows: list[RowKeys], keys: list[tuple[int, int]]) -> list[RowKeys]:
    """Rows of the same fold key go to the same model and adapter, as the key covers the model."""
    for row, key in zip(rows, keys, strict=False):
        row.fold = key
        if key != (0, 0):
            row.target = sum(key) % len(TARGETS)
    return rows


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(row_keys, max_size=60), keys=folds, piece_rows=st.integers(1, 70))
def test_every_row_stands_once(tmp_path_factory, rows, keys, piece_rows):
    """Each row is a leader, a follower or refused, once; shards tile the positions, one model each."""
    rows = with_folds(rows, keys)
    reader = make_plan(write_dataset(tmp_path_factory.mktemp("plan"), rows), replace(KEYED, piece_rows=piece_rows))
    leaders, followers = rows_of(reader), dict(reader.followers())
    refused = [n for n, row in enumerate(rows) if row.rejected]
    assert sorted([*leaders, *followers, *refused]) == list(range(len(rows)))
    assert list(followers) == sorted(followers)
    for follower, leader in followers.items():
        assert leader in leaders and leader < follower and rows[leader].fold == rows[follower].fold != (0, 0)
    led = [rows[n].fold for n in leaders if rows[n].fold != (0, 0)]
    assert len(led) == len(set(led))
    position = 0
    for number, shard in enumerate(reader.shards()):
        assert (shard.number, shard.lo) == (number, position) and shard.lo < shard.hi
        assert {TARGETS[rows[n].target][0] for n in leaders[shard.lo : shard.hi]} == {shard.model}
        position = shard.hi
    assert position == len(leaders)
    reader.check()


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(row_keys, max_size=60))
def test_order_is_model_adapter_prefix_cost_number(tmp_path_factory, rows):
    """Rows run by model, adapter with the base first, prefix key, cost from high to low, and then as in the file."""
    reader = make_plan(write_dataset(tmp_path_factory.mktemp("plan"), rows))

    def rank(n: int) -> tuple:
        model, adapter = TARGETS[rows[n].target]
        return model, adapter is not None, adapter or "", rows[n].prefix, -rows[n].cost, n

    assert rows_of(reader) == sorted((n for n, row in enumerate(rows) if not row.rejected), key=rank)


def reference(rows: list[RowKeys]) -> tuple[list[int], list[tuple[int, int]]]:
    """(order, followers and their leaders) by dictionaries and one sort."""
    leaders: dict[tuple[int, int], int] = {}
    order, followers = [], []
    for n, row in enumerate(rows):
        leader = n if row.rejected or row.fold == (0, 0) else leaders.setdefault(row.fold, n)
        if not row.rejected:
            (order if leader == n else followers).append(n if leader == n else (n, leader))

    def rank(n: int) -> tuple:
        model, adapter = TARGETS[rows[n].target]
        keeps_order = model in SECOND_KEEPS_ORDER.file_order
        keys = (0, 0) if keeps_order else (rows[n].prefix, -rows[n].cost)
        return model, adapter is not None, adapter or "", *keys, n

    return sorted(order, key=rank), followers


@settings(deadline=None, max_examples=200)
@given(rows=st.lists(row_keys, max_size=80), keys=folds, piece_rows=st.integers(1, 25))
def test_pieces_change_nothing(tmp_path_factory, rows, keys, piece_rows):
    """Order and folding are those of a plain sort, and every byte of the plan is that of one piece."""
    rows = with_folds(rows, keys)
    written = write_dataset(tmp_path_factory.mktemp("plan"), rows)
    make_plan(written, SECOND_KEEPS_ORDER)
    files = {path.name: path.read_bytes() for path in written.plan.iterdir()}
    reader = make_plan(written, replace(SECOND_KEEPS_ORDER, piece_rows=piece_rows))
    assert {path.name: path.read_bytes() for path in written.plan.iterdir()} == files
    assert (rows_of(reader), list(reader.followers())) == reference(rows)


def test_a_prefix_key_too_long_stops_the_job(tmp_path):
    """A prefix key with more bits than its levels is a broken dataset: it would run under another model."""
    with pytest.raises(LedgerBroken, match="more than 60 bits"):
        make_plan(write_dataset(tmp_path, [RowKeys(prefix=2**60)]), ONE)


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(row_keys, max_size=40), keys=folds)
def test_plan_is_a_function(tmp_path_factory, rows, keys):
    """The same dataset gives the same plan, to the byte."""
    rows, made = with_folds(rows, keys), []
    for _ in range(2):
        written = write_dataset(tmp_path_factory.mktemp("plan"), rows)
        make_plan(written)
        made.append({path.name: path.read_bytes() for path in written.plan.iterdir()})
    assert made[0] == made[1]


def test_models_of_file_order_keep_it(tmp_path):
    """A model that gains nothing from prefixes keeps the file's order; folding still works."""
    rows = [RowKeys(prefix=9 - n, cost=n, fold=(4, 4) if n in (2, 7) else (0, 0)) for n in range(9)]
    order = PlanOrder(targets=[(0, None)], shard_rows=[ShardRows(4)], keys=True, file_order=[0])
    reader = make_plan(write_dataset(tmp_path, rows), order)
    assert rows_of(reader) == [0, 1, 2, 3, 4, 5, 6, 8]
    assert list(reader.followers()) == [(7, 2)]


def test_an_order_that_is_the_files_needs_no_order_file(tmp_path):
    """Keys that change nothing leave position and number the same."""
    reader = make_plan(write_dataset(tmp_path, [RowKeys(prefix=n) for n in range(9)]), ONE)
    assert not reader.plan.permuted
    assert not (reader.home / ORDER).exists()


def test_refused_rows_lead_nobody(tmp_path):
    """A refused row shares no outcome, even when its request equals another's."""
    rows = [RowKeys(fold=(1, 2), rejected=True), RowKeys(fold=(1, 2)), RowKeys(fold=(1, 2))]
    reader = make_plan(write_dataset(tmp_path, rows), ONE)
    assert list(reader.followers()) == [(2, 1)]


def test_half_a_key_in_common_folds_nothing(tmp_path):
    """Only all 128 bits make rows equal."""
    rows = [RowKeys(fold=(1, 2)), RowKeys(fold=(1, 3)), RowKeys(fold=(2, 2)), RowKeys(fold=(1, 3))]
    reader = make_plan(write_dataset(tmp_path, rows), ONE)
    assert list(reader.followers()) == [(3, 1)]


def test_an_unknown_target_stops_the_job(tmp_path):
    """A target that the order does not know is a broken dataset."""
    with pytest.raises(LedgerBroken, match="target 1 of 1"):
        make_plan(write_dataset(tmp_path, [RowKeys(target=1)]), ONE)


def test_a_short_column_stops_the_job(tmp_path):
    """A column that lacks rows is a broken dataset."""
    written = write_dataset(tmp_path, [RowKeys()] * 3)
    (written.dataset / "cost.u32").write_bytes(b"\0" * 8)
    with pytest.raises(LedgerBroken, match="2 values instead of 3"):
        make_plan(written, ONE)


def test_damaged_followers_are_found(tmp_path):
    """A changed follower is found by `check`."""
    reader = make_plan(write_dataset(tmp_path, [RowKeys(fold=(1, 1))] * 3), ONE)
    (reader.home / FOLLOWERS).write_bytes(b"\0" * 16)
    with pytest.raises(LedgerBroken, match="checksum"):
        reader.check()


def test_groups_are_those_that_save_most(tmp_path):
    """Rows over three long system prompts with the same opening words are three groups, and the share says so."""
    opening, prompts = 77 << 50, (1, 2, 3)
    rows = [RowKeys(prefix=opening + prompt, bytes=5000, cost=10) for _ in range(10) for prompt in prompts]
    reader = make_plan(write_dataset(tmp_path, rows), ONE)
    result = explain(reader.plan, ["m"])
    assert result.groups[0].prefix_groups == 3
    assert result.shared_prefix == pytest.approx((27 * 4096 + 2 * 2048) / (30 * 5000))
    assert result.tokens == 300


def test_rows_without_a_prompt_share_nothing(tmp_path):
    """Prefix key 0 says that there is no prompt: no group, nothing in common."""
    reader = make_plan(write_dataset(tmp_path, [RowKeys(prefix=0)] * 5), ONE)
    assert (reader.plan.targets[0].prefix_groups, reader.plan.targets[0].shared_bytes) == (0, 0)
