import datetime as dt
import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchmill.datasets.formats import columns_schema
from batchmill.datasets.sealed import SealedRows
from batchmill.errors import InvalidDataset

UTC = dt.UTC


@pytest.fixture
def save(tmp_path):
    def save_table(table, name="t.parquet", **options):
        path = tmp_path / name
        pq.write_table(table, path, **options)
        return str(path)

    return save_table


CASES = [
    (pa.int64(), [2**62 + 1, None, -1], ["4611686018427387905", "null", "-1"]),
    (pa.uint64(), [2**64 - 1], ["18446744073709551615"]),
    (pa.float64(), [0.1, 1e300, float("nan")], ["0.1", "1e300", "null"]),
    (pa.float16(), [1.5], ["1.5"]),
    (pa.bool_(), [True, None], ["true", "null"]),
    (pa.string(), ['é"\n', ""], ['"é\\"\\n"', '""']),
    (pa.null(), [None], ["null"]),
    (pa.decimal128(38, 4), [Decimal("12345678901234567890.1230")], ["12345678901234567890.1230"]),
    (pa.binary(), [b"\0\xff", None], ['"AP8="', "null"]),
    (pa.date32(), [dt.date(2024, 2, 29)], ['"2024-02-29"']),
    (pa.time64("us"), [dt.time(1, 2, 3, 4)], ['"01:02:03.000004"']),
    (pa.timestamp("ms"), [dt.datetime(2024, 1, 2, 3, 4, 5), None], ['"2024-01-02T03:04:05.000"', "null"]),
    (pa.timestamp("ns"), [1_700_000_000_123_456_789], ['"2023-11-14T22:13:20.123456789"']),
    (
        pa.timestamp("us", "Europe/Berlin"),
        [dt.datetime(2024, 1, 2, 3, 4, 5, 6, UTC)],
        ['"2024-01-02T03:04:05.000006Z"'],
    ),
    (pa.duration("ms"), [dt.timedelta(seconds=2)], ["2000"]),
    (pa.list_(pa.int32()), [[1, None], [], None], ["[1,null]", "[]", "null"]),
    (pa.list_(pa.float32(), 2), [[0.5, 1.0], None, [2.0, 3.0]], ["[0.5,1.0]", "null", "[2.0,3.0]"]),
    (pa.list_(pa.timestamp("ms")), [[dt.datetime(2024, 1, 1)]], ['["2024-01-01T00:00:00.000"]']),
    (pa.struct([("x", pa.int8()), ("y", pa.binary())]), [{"x": 1, "y": b"a"}, None], ['{"x":1,"y":"YQ=="}', "null"]),
    (pa.map_(pa.string(), pa.decimal64(5, 2)), [[("a", Decimal("1.50"))], None, []], ['{"a":1.50}', "null", "{}"]),
    (pa.dictionary(pa.int8(), pa.string()), ["a", "b", "a"], ['"a"', '"b"', '"a"']),
]


@pytest.mark.parametrize(("kind", "values", "expected"), CASES, ids=[str(case[0]) for case in CASES])
def test_types(save, sealed, home, kind, values, expected):
    """Each type becomes the JSON that says the same; decimals keep their digits; the schema is kept."""
    table = pa.table({"v": pa.array(values, kind), "n": list(range(len(values)))})
    path = save(table)
    report = sealed(path)
    rows = SealedRows(home).read(0, len(values))
    assert rows == [b'{"v":%s,"n":%d}' % (text.encode(), n) for n, text in enumerate(expected)]
    assert columns_schema(home) == pq.read_schema(path).remove_metadata()
    assert (report.seal.columns, report.problems) == (["v", "n"], [])


def test_sliced_batches_of_lists(save, sealed, home):
    """Lists and structs of every batch and row group belong to their own row."""
    n = 20_000
    table = pa.table(
        {"l": [list(range(i % 5)) if i % 7 else None for i in range(n)], "s": [{"i": i} for i in range(n)]}
    )
    sealed(save(table, row_group_size=3000))
    rows = SealedRows(home)
    expected = table.to_pylist()
    assert [json.loads(row) for row in rows.read(0, rows.rows)] == expected


def test_several_files(save, sealed, home):
    """Files with the same schema are one dataset, and a problem names the file and its row in it."""
    one = save(pa.table({"a": ["x", "y"]}), "1.parquet")
    two = save(pa.table({"a": ["z", "w" * 300]}), "2.parquet")
    report = sealed(one, two, spec={"line_bytes_max": 100})
    assert [(p.code, p.path, p.line, p.row) for p in report.problems] == [("line_too_long", two, 2, 3)]
    assert json.loads(SealedRows(home).read(2, 3)[0]) == {"a": "z"}


def test_unlike_schemas(save, sealed):
    """Files with other columns or types are refused."""
    with pytest.raises(InvalidDataset, match="other columns or types") as caught:
        sealed(save(pa.table({"a": [1]}), "1.parquet"), save(pa.table({"a": ["x"]}), "2.parquet"))
    assert caught.value.code == "schema_mismatch"


@pytest.mark.parametrize(
    ("table", "code"),
    [
        (pa.table({"a": pa.array([[(1, 2)]], pa.map_(pa.int32(), pa.int32()))}), "unsupported_type"),
        (pa.table([[1], [2]], names=["a", "a"]), "invalid_header"),
        (pa.table({f"c{n}": [1] for n in range(10_001)}), "schema_too_large"),
        (pa.table({"a": pa.array([], pa.int64())}), "empty_file"),
        (pa.table({"output": [1]}), "column_conflict"),
    ],
    ids=["map of numbers", "twice", "wide", "empty", "conflict"],
)
def test_files_that_cannot_be_sealed(save, sealed, table, code):
    """What JSON has no form for, or no limit allows, is refused by name."""
    with pytest.raises(InvalidDataset) as caught:
        sealed(save(table))
    assert caught.value.code == code


def test_a_damaged_page(save, sealed):
    """Bytes that are spoilt inside the file are an error of the file, not a crash."""
    path = save(pa.table({"a": [str(n) * 10 for n in range(10_000)]}), compression="snappy", use_dictionary=False)
    with open(path, "r+b") as file:
        file.seek(1000)
        file.write(b"\xff" * 5000)
    with pytest.raises(InvalidDataset) as caught:
        sealed(path)
    assert caught.value.code == "invalid_parquet"
