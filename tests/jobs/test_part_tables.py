"""Results in parts as CSV and Parquet: together they are what one file would be, with the same columns and types."""

import hashlib
import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from finished_job import FinishedJob, quiet
from msgspec.structs import replace
from test_results_of_columns import ColumnJob
from test_results_tables import answer, read_csv, table_job

from batchmill.cli.jobs.result_parts import open_parts
from batchmill.errors import InvalidInput
from batchmill.jobs.results.gathering import gather
from batchmill.jobs.results.parts.output_folders import PartManifest, read_manifest
from batchmill.jobs.results.parts.parts_run import PartsRun
from batchmill.jobs.results.results import COLUMNS_MAX, Learned, Manifest, check_output, merged
from batchmill.types import RowError

JOB = "job_" + "a" * 20


async def offload(target: str, order: bytes, progress) -> bytes:
    """As a child process would."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)(order, progress)


async def gather_parts(
    job: FinishedJob, output: Path, kind: str, part_rows: int, unrun: RowError | None = None
) -> Manifest:
    spec = SimpleNamespace(id=JOB, replaced_job=None, output_format=kind, part_rows=part_rows)
    order = replace(job.order(output, unrun=unrun), output=f"{output}/")
    shares: list[float] = []
    found = await PartsRun(spec, SimpleNamespace(home=job.home), offload, "").run(order, shares.append)
    assert shares == sorted(shares) and all(0 <= share <= 1 for share in shares)
    return found


def manifest_of(output: Path) -> PartManifest:
    manifest = read_manifest(f"{output}/")
    assert manifest is not None
    for part in manifest.parts:
        data = (output / part.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (part.bytes, part.sha256)
    assert {path.name for path in output.iterdir()} == {"manifest.json", *(part.name for part in manifest.parts)}
    return manifest


# Each column and the results have other kinds of values in other parts.
ROWS = [
    '{"n":1,"x":"text","deep":{"a":[1]}}',
    '{"n":2,"only here":true,"x":null}',
    '{"n":3.5,"x":7}',
    '{"n":12345678901234567890}',
    '{"y":[1,2],"n":null}',
    '{"n":6,"y":[1.5]}',
    '{"n":7}',
]
OUTPUTS = ["1", "2.5", "null", "9007199254740993", "[1]", '{"usage":{}}', '"t"']
INTS = ["1", "2", "null", "4", "5", "6", "9007199254740993"]


@pytest.mark.parametrize("part_rows", [1, 3, 7, 100])
@pytest.mark.parametrize("outputs", [OUTPUTS, INTS])
async def test_parts_are_typed_as_one_file(tmp_path, part_rows, outputs):
    """Columns and types are those of all rows, in every part; the rows are those of one file."""
    job = table_job(tmp_path, ROWS)
    answer(job, outputs)
    for kind in ("csv", "parquet"):
        one, output = tmp_path / f"one.{kind}", tmp_path / kind
        whole = gather(job.order(one), quiet)
        found = await gather_parts(job, output, kind, part_rows)
        assert (found.rows, found.ok, found.failed, found.causes) == (whole.rows, whole.ok, whole.failed, whole.causes)
        manifest = manifest_of(output)
        assert [part.first for part in manifest.parts] == list(range(0, 7, part_rows))
        paths = [output / part.name for part in manifest.parts]
        if kind == "csv":
            tables = [read_csv(path.read_text()) for path in paths]
            (header,) = {tuple(table[0]) for table in tables}
            assert [list(header), *(row for table in tables for row in table[1:])] == read_csv(one.read_text())
        else:
            tables = [pq.read_table(path) for path in paths]
            assert pa.concat_tables(tables).equals(pq.read_table(one))


async def test_csv_parts_are_read_as_one_file(tmp_path):
    """The header is given once, also one with a line end in it; Parquet is not joined."""
    job = table_job(tmp_path, [row.replace('"y"', r'"y,\"\ny"') for row in ROWS])
    answer(job, OUTPUTS)
    gather(job.order(tmp_path / "one.csv"), quiet)
    await gather_parts(job, tmp_path / "csv", "csv", 2)
    name, pieces = await open_parts(f"{tmp_path}/csv/", errors=False)
    assert name.endswith("part.csv")
    assert b"".join([piece async for piece in pieces]) == (tmp_path / "one.csv").read_bytes()
    (tmp_path / "plain").mkdir()
    job = table_job(tmp_path / "plain", ROWS)
    answer(job, OUTPUTS)
    await gather_parts(job, tmp_path / "parquet", "parquet", 2)
    with pytest.raises(InvalidInput, match="4 Parquet files"):
        await open_parts(f"{tmp_path}/parquet/", errors=False)


async def test_columns_of_any_name(tmp_path):
    """Quotes, backslashes and control characters in the names of columns change nothing in Parquet."""
    name = 'y\\ "\n'
    for folder, rows in (("plain", ROWS), ("strange", [row.replace('"y"', json.dumps(name)) for row in ROWS])):
        (tmp_path / folder).mkdir()
        job = table_job(tmp_path / folder, rows)
        answer(job, OUTPUTS)
        gather(job.order(tmp_path / f"{folder}.parquet"), quiet)
    plain, strange = (pq.read_table(tmp_path / f"{folder}.parquet") for folder in ("plain", "strange"))
    assert strange.rename_columns([each.replace(name, "y") for each in strange.column_names]).equals(plain)


@pytest.mark.parametrize("part_rows", [1, 4, 10])
@pytest.mark.parametrize("values", ["a column", "json"])
async def test_parts_of_columns(tmp_path, part_rows, values):
    """Results that a function gave as a column keep its type in every part, those of JSON have one type together."""
    job = ColumnJob(tmp_path)
    if values == "a column":
        job.commit(job.columns(range(9), pa.array(range(9), pa.int16())))
    else:
        texts = pa.array([b"1", b"2", b"3.5", b"4", b"5", b"6", b"7", b"8", b"9"])
        job.commit(job.columns(range(9), texts, "json"))
    unrun = RowError("unrun", "it never ran")
    for kind in ("csv", "parquet"):
        one, output = tmp_path / f"one.{kind}", tmp_path / kind
        gather(job.order(one, unrun=unrun), quiet)
        await gather_parts(job, output, kind, part_rows, unrun)
        paths = [output / part.name for part in manifest_of(output).parts]
        if kind == "parquet":
            found, expected = pa.concat_tables([pq.read_table(path) for path in paths]), pq.read_table(one)
            assert found.schema.equals(expected.schema)
            assert str(found.to_pylist()) == str(expected.to_pylist())  # there is a NaN
        else:
            lines = [path.read_text().splitlines(keepends=True) for path in paths]
            assert [lines[0][0], *(line for part in lines for line in part[1:])] == (
                one.read_text().splitlines(keepends=True)
            )


def test_what_parts_can_be(tmp_path):
    """OpenAI rows are no table; packed parts are refused by name."""
    with pytest.raises(InvalidInput, match="results of OpenAI batch rows are JSONL"):
        check_output(f"{tmp_path}/", "openai", "csv")
    with pytest.raises(InvalidInput, match=r"parts cannot be written as 'csv\.gz'"):
        check_output(f"{tmp_path}/", "csv", "csv.gz")
    check_output(f"{tmp_path}/", "csv", "parquet")


def test_too_many_columns_of_all_parts():
    """The limit holds for all parts together."""
    names = [f"c{number}" for number in range(COLUMNS_MAX)]
    halves = [Learned(names[:9000]), Learned(names[5000:])]
    assert merged(halves).names == names
    with pytest.raises(InvalidInput) as caught:
        merged([*halves, Learned(["one more"])])
    assert caught.value.code == "too_many_columns"
