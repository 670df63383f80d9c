"""Data of a program as files, and results in the shape of the frame that they came from."""

import datetime
from dataclasses import dataclass

import duckdb
import msgspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchmill.client.frame_shapes import (
    FrameShape,
    failed_rows,
    failures_of,
    read_failed,
    read_results,
    to_pandas,
    to_polars,
    with_types,
)
from batchmill.client.frames import GROUP_ROWS, is_data, write_data
from batchmill.errors import InvalidInput

ROWS = [{"text": "a", "n": 1}, {"text": "b", "n": 2}]
TABLE = pa.Table.from_pylist(ROWS)


@dataclass
class Row:
    text: str
    n: int


class Named(msgspec.Struct):
    text: str
    n: int


def answered(path, output=("x", "y"), error=(None, None)):
    """Results of these rows, as a job writes them."""
    table = pq.read_table(path)
    table = table.append_column("output", pa.array(output)).append_column("error", pa.array(error, pa.string()))
    pq.write_table(table, path)
    return read_results(path)


def test_every_table_is_the_same_file(tmp_path):
    """A frame of any library, a table, a relation and a dict of columns with the same rows make the same rows."""
    path = tmp_path / "data"
    tables = {
        "": {"text": ["a", "b"], "n": [1, 2]},
        "pandas": pd.DataFrame(ROWS),
        "polars": pl.DataFrame(ROWS),
        "pyarrow": TABLE,
        "duckdb": duckdb.sql("select * from (values ('a', 1::bigint), ('b', 2)) as t(text, n)"),
    }
    for library, data in tables.items():
        assert is_data(data)
        written = write_data(data, path)
        assert written.suffix == ".parquet" and written.shape.library == library, library
        assert pq.read_table(path).to_pylist() == ROWS, library


def test_rows_are_json_lines(tmp_path):
    """Dicts, and objects with fields, from a list or from what yields them once."""
    path = tmp_path / "data"
    for rows in (ROWS, (each for each in ROWS), [Row("a", 1), Row("b", 2)], (Named(**each) for each in ROWS)):
        assert is_data(rows) and write_data(rows, path).suffix == ".jsonl"
        assert [msgspec.json.decode(line) for line in path.read_bytes().splitlines()] == ROWS
    moment = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    values = {"a": np.float64(0.5), "b": np.arange(2), "c": moment, "d": pd.Timestamp(moment), "e": None, "f": pd.NaT}
    write_data([values], path)
    assert msgspec.json.decode(path.read_bytes()) == {
        "a": 0.5, "b": [0, 1], "c": "2026-01-02T00:00:00Z", "d": "2026-01-02T00:00:00+00:00", "e": None, "f": None,
    }  # fmt: skip


def test_names_of_files_are_no_data(tmp_path):
    """Paths, lists of them and open files are read where they lie."""
    with open(tmp_path / "x", "w+b") as file:
        for source in ("x", tmp_path, ["x", tmp_path], file):
            assert not is_data(source)


def test_the_same_rows_make_the_same_bytes(tmp_path):
    """However a library cut them into pieces: the name of the file is the identity of the job."""
    rows = 2 * GROUP_ROWS + 10
    table = pa.table({"n": np.arange(rows), "text": pa.array([str(each % 7) for each in range(rows)])})
    pieces = [table.slice(first, 999) for first in range(0, rows, 999)]
    write_data(table, tmp_path / "whole")
    write_data(pa.concat_tables(pieces), tmp_path / "pieces")
    write_data(pa.RecordBatchReader.from_batches(table.schema, table.to_batches(1000)), tmp_path / "stream")
    whole = (tmp_path / "whole").read_bytes()
    assert whole == (tmp_path / "pieces").read_bytes() == (tmp_path / "stream").read_bytes()
    groups = pq.ParquetFile(tmp_path / "whole").metadata
    assert [groups.row_group(n).num_rows for n in range(groups.num_row_groups)] == [GROUP_ROWS, GROUP_ROWS, 10]


def odd_frame():
    """What a frame of pandas may hold: categories, time zones, nested values, nullable and numbered columns."""
    zone = pd.Timestamp("2026-01-02 03:04:05", tz="Europe/Berlin")
    return pd.DataFrame(
        {
            0: pd.Categorical(["a", "b", "a"], categories=["b", "a", "c"], ordered=True),
            1: [zone, pd.NaT, zone],
            "nested": [{"x": [1]}, {"x": []}, None],
            "list": [[1.5], [], None],
            "whole": pd.array([1, None, 3], dtype="Int64"),
            "text": ["a", None, "c"],
            "part": np.array([1, 2, 3], dtype="int8"),
            "long": pd.to_timedelta([1, 2, 3], unit="s"),
        },
        index=pd.Index([7, 7, 1], name="key"),
    )


def test_a_frame_of_pandas_comes_back_as_it_was(tmp_path):
    """Its index, also one that repeats, its labels, also numbers, its order and its types."""
    frame, path = odd_frame(), tmp_path / "data"
    shape = write_data(frame, path).shape
    results = with_types(answered(path, [1, None, 3], [None, "E: no", None]), shape)
    found = to_pandas(results, shape)
    assert list(found.columns) == [*frame.columns, "output", "error"]
    assert dict(found.dtypes)["output"] == pd.Int64Dtype() and found["output"].tolist() == [1, pd.NA, 3]
    for name in frame.columns:
        if name not in ("nested", "list"):  # arrays now
            pd.testing.assert_series_equal(found[name], frame[name])
    assert [None if each is None else list(each) for each in found["list"]] == [[1.5], [], None]
    failed, numbers = failed_rows(results)
    assert numbers == [1] and to_pandas(failed, shape, numbers).index.tolist() == [7]
    assert to_pandas(failed, shape, numbers).index.name == "key"


def test_failed_rows_of_a_file_are_read_alone(tmp_path):
    """The same rows as of the whole table, with and without the statistics that let row groups be passed over."""
    path, rows = tmp_path / "results", 3 * GROUP_ROWS
    failing = (5, GROUP_ROWS - 1, 2 * GROUP_ROWS, rows - 1)  # none of the second group
    errors = pa.array(("E: no" if each in failing else None for each in range(rows)), pa.string())
    table = pa.table({"n": np.arange(rows), "nested": [{"error": "x"}] * rows, "error": errors})
    for statistics in (True, False):
        for group_rows in (GROUP_ROWS, rows):
            pq.write_table(table, path, group_rows, write_statistics=statistics)
            found, total, numbers = read_failed(path)
            assert (total, tuple(numbers)) == (rows, failing)
            assert found.equals(failed_rows(read_results(path))[0])
    pq.write_table(TABLE, path)  # no column for errors
    assert (len(read_failed(path)[0]), read_failed(path)[1]) == (0, 2)


def test_an_index_of_levels_stays(tmp_path):
    """A MultiIndex, and one of times, are the index of the results."""
    for index in (pd.MultiIndex.from_tuples([("a", 1), ("a", 1)]), pd.date_range("2026", periods=2, tz="UTC")):
        frame = pd.DataFrame(ROWS, index=index)
        shape = write_data(frame, tmp_path / "data").shape
        found = to_pandas(with_types(answered(tmp_path / "data"), shape), shape)
        pd.testing.assert_index_equal(found.index, index)


def test_frames_of_polars_keep_their_types(tmp_path):
    """Enums, times and lists; the answers stand behind them."""
    enum = pl.Series(["a", "b"], dtype=pl.Enum(["a", "b"]))
    frame = pl.DataFrame({"e": enum, "t": [datetime.datetime(2026, 1, 1)] * 2, "l": [["x"], []]})
    shape = write_data(frame, tmp_path / "data").shape
    found = to_polars(with_types(answered(tmp_path / "data"), shape), shape)
    assert found.columns == ["e", "t", "l", "output", "error"]
    assert found.select(frame.columns).equals(frame) and found.schema["e"] == frame.schema["e"]


def test_failures_are_a_frame_of_the_same_library(tmp_path):
    """With its types, also those of which Arrow itself takes no rows: texts of polars are views."""
    views = pa.table({"v": pa.array(["a", "b"], pa.string_view()), "d": pa.array(["x", "y"]).dictionary_encode()})
    frames = [
        pl.DataFrame(
            {"v": ["a", "b"], "s": [{"x": "a"}, {"x": "b"}], "c": pl.Series(["x", "y"], dtype=pl.Enum(["y", "x"]))}
        )
    ]
    for frame in [*frames, views, pd.DataFrame(ROWS)]:
        shape = write_data(frame, tmp_path / "data").shape
        failed = failures_of(answered(tmp_path / "data", [1, None], [None, "E: no"]), shape)
        assert type(failed) is type(frame) and len(failed) == 1, type(frame)
        if isinstance(frame, pl.DataFrame):
            assert failed.select(frame.columns).equals(frame[1:]) and failed["error"].to_list() == ["E: no"]
        elif isinstance(frame, pa.Table):
            assert failed.select(["v", "d"]).to_pylist() == frame.to_pylist()[1:]
            assert failed.schema.field("v").type == pa.string_view()


def test_results_without_a_frame(tmp_path):
    """A file's own results become frames as well."""
    pq.write_table(TABLE, tmp_path / "data")
    results = answered(tmp_path / "data")
    assert to_pandas(results, FrameShape()).to_dict("list")["text"] == ["a", "b"]
    assert failed_rows(results)[1] == []


def failing(value):
    yield ROWS[0]
    raise ValueError(value)


def test_what_is_no_dataset_is_refused(tmp_path):
    """Each with the value and a way out."""
    two_named = pd.DataFrame([[1, 2]], columns=[1, "1"])
    for data, message in (
        (pd.DataFrame({"a": []}), "no rows"),
        (pd.DataFrame(index=[1, 2]), "2 rows and no column"),
        ([], "no rows"),
        ({}, "no column"),
        (iter(()), "no rows"),
        (two_named, "two columns are called '1'"),
        (pd.DataFrame([[1, 2]], columns=pd.MultiIndex.from_tuples([("a", 1), ("a", 2)])), "2 levels"),
        (pd.DataFrame({"mixed": [1, "a", b""]}), "mixed"),
        (pd.Series([1, 2]), "to_frame"),
        (pl.DataFrame(ROWS).lazy(), "collect"),
        ({"a": [1], "b": [1, 2]}, "no table"),
        ({1: [1]}, "names of text"),
        ({"text": "abc"}, "'text' is a str: give a list"),
        ({"text": {"a": 1}}, "'text' is a dict: give a list"),
        (pl.DataFrame({"a": pl.Series([object()], dtype=pl.Object)}), "type Object has no form"),
        ([1, 2], "row 0 is a int"),
        ([{"a": 1}, {"a": object()}], "row 1 cannot be written"),
        (b"bytes", "bytes is no dataset"),
        (7, "int is no dataset"),
    ):
        with pytest.raises(InvalidInput, match=message):
            write_data(data, tmp_path / "data")
    with pytest.raises(ValueError, match="mine"):  # an error of the program's own rows is the program's
        write_data(failing("mine"), tmp_path / "data")


class HubSplit:
    """What is read of a dataset of Hugging Face: it hands out tables, and says how it is viewed."""

    __module__ = "datasets.arrow_dataset"

    def __init__(self, table=TABLE, kind=None, columns=None):
        self.table, self.format = table, {"type": kind, "columns": columns or table.column_names}

    def with_format(self, kind, columns):
        assert kind == "arrow"
        return HubSplit(self.table.select(columns))

    def iter(self, batch_size):
        yield from (self.table.slice(first, 1) for first in range(len(self.table)))


class HubSplits(dict):
    __module__ = "datasets.dataset_dict"

    def with_format(self, kind):
        raise AssertionError("it is refused before")


def test_a_dataset_of_hugging_face(tmp_path):
    """The columns that it shows; several splits and rows that are made on access are refused, not read as they lie."""
    path = tmp_path / "data"
    assert write_data(HubSplit(), path).shape.library == "datasets" and pq.read_table(path).to_pylist() == ROWS
    write_data(HubSplit(columns=["n"]), path)
    assert pq.read_table(path).column_names == ["n"]
    with pytest.raises(InvalidInput, match=r"such as data\['test'\]"):
        write_data(HubSplits(test=HubSplit()), path)
    with pytest.raises(InvalidInput, match="with_transform"):
        write_data(HubSplit(kind="custom"), path)
