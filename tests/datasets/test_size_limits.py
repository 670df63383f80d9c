"""Small files that become very large: sealing ends near its bound, whatever packs them, and leaves nothing."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from dataset_rows import openai_row

from batchmill.datasets import formats, layout, orders, parquet_rows
from batchmill.datasets.formats import classify, detect
from batchmill.datasets.sealing import SealOrder, seal
from batchmill.errors import InvalidDataset, OverQuota
from batchmill.types import DatasetSpec

MIB = 1024 * 1024
BOUND = MIB
SLACK = 17 * MIB  # a slice of zstd may become 16 MiB


def parquet(table: pa.Table, **options: object) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, **options)
    return out.getvalue()


def bombs() -> dict[str, bytes]:
    """Of each kind of file one that becomes 32 MiB and more: in blank rows, long rows, or in its index alone."""
    line = openai_row("a", {"messages": [{"role": "user", "content": "x" * MIB}]}) + b"\n"
    blank = b"a\n" + b"\n" * 500_000
    return {
        "in.jsonl.gz": gzip.compress(line * 40),
        "in.jsonl.zst": zstandard.compress(line * 40),
        "in.csv.gz": gzip.compress(blank),
        "in.csv.zst": zstandard.compress(blank),
        "in.csv": blank,
        "in.parquet": parquet(pa.table({"a": pa.array([""]).take(pa.array([0] * 500_000))})),
        "in.jsonl": b"{}\n" * MIB,  # of which only the index is written
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    home = tmp_path_factory.mktemp("bombs")
    for name, data in bombs().items():
        (home / name).write_bytes(data)
    return [str(home / name) for name in bombs()]


def refused(home: Path, path: str, *, spec: dict | None = None, **order: object) -> tuple[Exception, int]:
    """Why a file is refused, and how much lay on the disk at most."""
    most = 0

    def look(share: float) -> None:
        nonlocal most
        most = max(most, sum(each.stat().st_size for each in home.iterdir()))

    with pytest.raises((InvalidDataset, OverQuota)) as caught:
        seal(SealOrder(DatasetSpec([path], **(spec or {})), keys=True, **order), home, look)
    return caught.value, most


def test_unpacking_ends_at_its_bound(files: list[str], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a file is packed with, and whichever bound it meets, no more than a buffer beyond the bound is ever on
    the disk, and nothing afterwards; the refusal names the setting."""
    monkeypatch.setattr(orders, "FREE_BYTES", BOUND)
    for path in files:
        for received, spec, order in (
            ("limits.unpacked_bytes_max", {"unpacked_bytes_max": BOUND}, {}),
            ("limits.unpacked_ratio_max", {"unpacked_ratio_max": 1}, {}),
            ("no room", {"unpacked_ratio_max": 10**9}, {"bytes_left": BOUND, "no_space_message": "no room"}),
        ):
            if received == "limits.unpacked_ratio_max" and Path(path).stat().st_size > BOUND // 2:
                continue  # so large a file may become more
            error, most = refused(home, path, spec=spec, **order)
            assert received in str(error), (path, error)
            assert error.code == ("quota_exceeded" if order else "unpacked_too_large")
            assert most <= BOUND + SLACK, (path, most)
            assert list(home.iterdir()) == []


def test_rows_are_counted_while_they_are_unpacked(files: list[str], home: Path) -> None:
    """A file with one row more than may be is refused before the rest of it is unpacked; one with as many is sealed."""
    for path in [each for each in files if Path(each).suffix in (".csv", ".parquet")]:
        error, most = refused(home, path, spec={"rows_max": 1000})
        assert error.code == "too_many_rows" and "limits.rows_max" in str(error)
        assert most <= SLACK
        assert "server.rows_max" in str(refused(home, path, rows_max=1000)[0])
    small = home.parent / "small.csv"
    for rows, is_taken in ((1000, True), (1001, False)):
        small.write_text("a\n" + "x\n" * rows)
        order = SealOrder(DatasetSpec([str(small)], rows_max=1000))
        if is_taken:
            assert seal(order, home, lambda _: None).seal.rows == rows
        else:
            assert refused(home, str(small), spec={"rows_max": 1000})[0].code == "too_many_rows"
    assert not (home / layout.SEAL).exists()


def test_a_file_that_says_how_many_rows_it_has_is_refused_before_one_is_read(
    files: list[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of which not even the least would fit are not converted until they no longer do."""
    monkeypatch.setattr(orders, "FREE_BYTES", BOUND)
    path = next(each for each in files if each.endswith(".parquet"))
    for code, spec, order in (
        ("too_many_rows", {"rows_max": 1000}, {}),
        ("unpacked_too_large", {"unpacked_bytes_max": BOUND}, {}),
        ("quota_exceeded", {"unpacked_ratio_max": 10**9}, {"bytes_left": BOUND, "no_space_message": "no room"}),
    ):
        error, most = refused(home, path, spec=spec, **order)
        assert (error.code, most) == (code, 0)


def test_a_long_value_of_many_rows_is_not_held_as_often(tmp_path: Path) -> None:
    """A text that a Parquet file has once, and names in thousands of rows, is never in memory for all of them."""
    path = tmp_path / "in.parquet"
    column = pa.DictionaryArray.from_arrays(pa.array([0, None] * 4000, pa.int32()), pa.array(["x" * MIB]))
    path.write_bytes(parquet(pa.table({"a": column})))
    spec = DatasetSpec([str(path)])
    (source,) = classify(spec)
    rows = 0
    for piece in parquet_rows.convert(source, spec, ["a"], lambda _: None):
        assert len(piece.data) <= parquet_rows.BATCH_BYTES + 2 * MIB
        rows += piece.rows
        if rows > 100:
            break


def test_memory_of_a_page_is_bounded(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that unpacks to more than may be held is refused, with what to do about it."""
    monkeypatch.setattr(parquet_rows, "MEMORY_BYTES", 64 * MIB)
    path = tmp_path / "in.parquet"
    zeros = pa.repeat(pa.scalar(0, pa.int64()), 16 * MIB)  # of one row, which no page divides
    table = pa.table({"a": pa.ListArray.from_arrays([0, len(zeros)], zeros)})
    path.write_bytes(parquet(table, use_dictionary=False, compression="zstd"))
    assert path.stat().st_size < MIB
    error, _ = refused(home, str(path))
    assert error.code == "invalid_parquet" and "smaller pages" in str(error)


def test_what_a_file_is_costs_little_to_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither blank lines without end nor a record without end are unpacked whole to see what a file is."""
    monkeypatch.setattr(formats, "BLANK_LINES_MAX", 1000)
    for name, data, code in (
        ("a.jsonl.gz", b"\n" * 1_000_000, "not_jsonl"),
        ("a.csv.gz", b"a," * 4 * MIB, "invalid_csv"),
        ("b.csv.gz", b'"a\n",' * MIB, "invalid_csv"),
    ):
        path = tmp_path / name
        path.write_bytes(gzip.compress(data))
        with pytest.raises(InvalidDataset) as caught:
            detect(DatasetSpec([str(path)], line_bytes_max=MIB))
        assert caught.value.code == code
