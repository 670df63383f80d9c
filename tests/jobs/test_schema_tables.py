"""Tables of results with the fields of a schema, and with warnings: CSV and Parquet, from every kind of input."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from finished_job import FinishedJob, quiet
from test_part_tables import gather_parts, manifest_of
from test_results_tables import read_csv

from batchmill.jobs.results.gathering import gather
from batchmill.jobs.results.result_columns import field_kinds
from batchmill.jobs.results.results import ColumnKind
from batchmill.store.segments.format import BlockMeta, BlockRows, frame
from batchmill.types import Outcome, OutputSchema, Row, RowError
from batchmill.wire.rows.forms import TableForm
from batchmill.wire.schemas.output_schema import schema_of_fields

TEXTS = ["a", "b", "c"]
REPLY = b'{"choices":[{"message":{"content":"said"}}]}'
FIELDS = "label: good|bad, score: float"


def write_input(folder: Path, kind: str, texts: list[str]) -> Path:
    path = folder / f"in.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"n": pa.array(range(len(texts)), pa.int16()), "text": texts}), path)
    elif kind == "csv":
        path.write_text("n,text\n" + "".join(f"{n},{text}\n" for n, text in enumerate(texts)))
    else:
        path.write_text("".join(json.dumps({"n": n, "text": text}) + "\n" for n, text in enumerate(texts)))
    return path


def schema_job(folder: Path, kind: str, schema: dict | None, texts: list[str], *, keys: bool = False) -> FinishedJob:
    document = None if schema is None else OutputSchema(json.dumps(schema))
    form = TableForm(prompt="{text}", is_text=kind == "csv", schema=document)
    return FinishedJob(folder / "job", write_input(folder, kind, texts), form, keys=keys)


def commit(job: FinishedJob, outcomes: dict[int, dict]) -> None:
    """Commit an outcome of each position, those that failed in a block of their own."""
    numbers = job.leaders
    for ok in (True, False):
        rows = [at for at, fields in outcomes.items() if ("error" in fields) is not ok]
        if rows:
            lines = [
                job.form.write(Outcome(Row(at, numbers[at], job.raws[numbers[at]], job.form), **outcomes[at]))
                for at in rows
            ]
            warnings = {name: 1 for at in rows for name in outcomes[at].get("warnings", ())}
            part = BlockRows(rows, [numbers[at] for at in rows], lines)
            meta = BlockMeta(warnings=warnings)
            job.commit(frame(part, generation=0, shard=0, epoch=1, ok=ok, meta=meta))


def answers(job: FinishedJob, values: list[str]) -> None:
    commit(job, {at: {"body": REPLY, "answer": value.encode()} for at, value in enumerate(values)})


@pytest.mark.parametrize("parts", [False, True], ids=["one", "parts"])
@pytest.mark.parametrize("case", ["fields", "warnings", "both", "failed"])
@pytest.mark.parametrize("output", ["csv", "parquet"])
@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
async def test_added_columns(tmp_path, kind, output, case, parts):
    """Fields, warnings and errors stand behind the input's columns; in Parquet each has its own type."""
    schema = None if case == "warnings" else schema_of_fields(FIELDS)
    job = schema_job(tmp_path, kind, schema, TEXTS)
    found = {"body": REPLY} | ({} if schema is None else {"answer": b'{"label":"good","score":0.5}'})
    other = dict(found)
    if case in ("warnings", "both"):
        other = {**found, "warnings": ("truncated",)}
    elif case == "failed":
        other = {"body": REPLY, "error": RowError("schema_mismatch", "no")}
    commit(job, {0: found, 1: other, 2: found})
    path = tmp_path / f"out.{output}"
    if parts:
        await gather_parts(job, tmp_path / "out", output, 2)
        paths = [tmp_path / "out" / part.name for part in manifest_of(tmp_path / "out").parts]
        assert len(paths) == 2
    else:
        gather(job.order(path), quiet)
        paths = [path]

    fields = [] if schema is None else ["label", "score"]
    own = [["error"], ["output", "error"]][schema is None or case == "failed"]
    header = ["n", "text", *fields, *own, *(["warnings"] if case in ("warnings", "both") else [])]
    good = {"label": "good", "score": 0.5, "output": "said" if schema is None else None, "error": None}
    rows = [{"n": n, "text": text, **good, "warnings": None} for n, text in enumerate(TEXTS)]
    if case == "failed":
        rows[1] |= {"label": None, "score": None, "output": "said", "error": "schema_mismatch: no"}
    elif case != "fields":
        rows[1]["warnings"] = "truncated"
    if output == "csv":
        tables = [read_csv(path.read_text()) for path in paths]
        assert {tuple(table[0]) for table in tables} == {tuple(header)}
        cells = [["" if row[name] is None else str(row[name]) for name in header] for row in rows]
        assert [record for table in tables for record in table[1:]] == cells
        return
    table = pa.concat_tables([pq.read_table(path) for path in paths])
    if kind == "csv":
        rows = [{**row, "n": str(row["n"])} for row in rows]
    assert table.to_pylist() == [{name: row[name] for name in header} for row in rows]
    types = {name: table.schema.field(name).type for name in header}
    assert types["n"] == {"csv": pa.string(), "parquet": pa.int16(), "jsonl": pa.int64()}[kind]
    assert types.pop("score", pa.float64()) == pa.float64() and types.pop("n")
    assert set(types.values()) == {pa.string()}


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_folded_rows_have_the_fields_too(tmp_path, kind):
    """A row that shares another's answer has its fields, and says whose they are."""
    job = schema_job(tmp_path, kind, schema_of_fields("score: float"), ["a", "a"], keys=True)
    commit(job, {0: {"body": REPLY, "answer": b'{"score":0.5}', "warnings": ("asked_again",)}})
    gather(job.order(tmp_path / "out.parquet"), quiet)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["score"].to_pylist() == [0.5, 0.5] and table["warnings"].to_pylist() == ["asked_again"] * 2
    assert table["folded_from"].to_pylist() == [None, 0] and table.schema.field("folded_from").type == pa.int64()


NULLABLE = {"anyOf": [{"type": "integer"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("field", "values", "kind", "written"),
    [
        ({"type": "number"}, ["1", "2"], pa.float64(), [1.0, 2.0]),
        ({"type": ["number", "null"]}, ["null", "null"], pa.float64(), [None, None]),
        ({"type": "integer"}, ["1.0", "2"], pa.int64(), [1, 2]),
        (NULLABLE, ["null", "9007199254740993"], pa.int64(), [None, 2**53 + 1]),
        ({"type": "boolean"}, ["null", "null"], pa.bool_(), [None, None]),
        ({"enum": ["a", "b", None]}, ["null", '"b"'], pa.string(), [None, "b"]),
        ({"const": 7}, ["7", "7"], pa.int64(), [7, 7]),
        ({"$ref": "#/$defs/a~1b"}, ["null", "null"], pa.float64(), [None, None]),
        ({"type": "array", "items": {"type": "string"}}, ['["a"]', "[]"], pa.list_(pa.string()), [["a"], []]),
        ({"type": "array", "items": {"type": "boolean"}}, ["[true]", "[]"], pa.list_(pa.bool_()), [[True], []]),
        ({"type": "array", "items": {"type": "integer"}}, ["[1.0,2]", "[]"], pa.list_(pa.int64()), [[1, 2], []]),
        ({"type": "array", "items": {"type": "number"}}, ["[1]", "[2]"], pa.list_(pa.float64()), [[1.0], [2.0]]),
        ({"type": "array", "items": NULLABLE}, ["[1]", "[2]"], pa.string(), ["[1]", "[2]"]),
        ({"type": "array"}, ["[1]", "[2]"], pa.string(), ["[1]", "[2]"]),
        ({"type": "object"}, ['{"a":1}', "{}"], pa.string(), ['{"a":1}', "{}"]),
        ({}, ["1", '"a"'], pa.string(), ["1", '"a"']),
        ({"type": ["integer", "string"]}, ["1", "2"], pa.string(), ["1", "2"]),
        ({"$ref": "#"}, ["{}", "null"], pa.string(), ["{}", None]),
        ({"anyOf": [{"const": "a"}, {"type": "string"}]}, ['"a"', '"b"'], pa.string(), ["a", "b"]),
        ({"anyOf": [{"type": "integer"}, {"type": "number"}]}, ["1", "2"], pa.float64(), [1.0, 2.0]),
        ({"anyOf": [{"type": "integer"}, {"minLength": 1}]}, ["1", '"b"'], pa.string(), ["1", '"b"']),
        ({"allOf": [{"$ref": "#/$defs/a~1b"}]}, ["1", "2"], pa.float64(), [1.0, 2.0]),
        ({"type": "string", "oneOf": [{"minLength": 3}, {"maxLength": 2}]}, ['"a"', "null"], pa.string(), ["a", None]),
        # These do not fit the type of the schema.
        ({"type": "integer"}, ["1", "9223372036854775808"], pa.string(), ["1", "9223372036854775808"]),
        ({"type": "number"}, ["0.5", "9007199254740993"], pa.string(), ["0.5", "9007199254740993"]),
        ({"type": "array", "items": {"type": "string"}}, ['["a"]', "[1]"], pa.string(), ['["a"]', "[1]"]),
    ],
)
async def test_types_are_those_of_the_schema(tmp_path, field, values, kind, written):
    """In every part, whatever the answers of its rows are; a column whose values do not fit is as others are."""
    schema = {"type": "object", "properties": {"x": field}, "$defs": {"a/b": {"type": "number"}}}
    job = schema_job(tmp_path, "csv", schema, TEXTS[:2])
    answers(job, [f'{{"x":{value}}}' for value in values])
    gather(job.order(tmp_path / "out.parquet"), quiet)
    await gather_parts(job, tmp_path / "parts", "parquet", 1)
    paths = [tmp_path / "parts" / part.name for part in manifest_of(tmp_path / "parts").parts]
    for table in (pq.read_table(tmp_path / "out.parquet"), pa.concat_tables(map(pq.read_table, paths))):
        assert (table.schema.field("x").type, table["x"].to_pylist()) == (kind, written)


def test_references_in_a_circle_have_no_type():
    """A schema may lead nowhere: such a field is JSON text."""
    circle = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}, "c": {"anyOf": [{"$ref": "#/$defs/c"}]}}
    circle["d"] = {"type": "array", "items": {"$ref": "#/$defs/d"}}
    fields = {"x": {"$ref": "#/$defs/a"}, "y": {"$ref": "#/$defs/c"}, "z": {"$ref": "#/nowhere"}}
    fields["list"] = {"$ref": "#/$defs/d"}
    document = {"type": "object", "properties": fields, "$defs": circle}
    kinds = field_kinds(OutputSchema(json.dumps(document), prefix="p_"))
    assert kinds == dict.fromkeys(("p_x", "p_y", "p_z", "p_list"), ColumnKind.JSON)
