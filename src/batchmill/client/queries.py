"""SQL over the results and the input of a job, by DuckDB in this process. A query reads no other files."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from batchmill.client.frame_shapes import is_parquet
from batchmill.client.result_copies import ResultCopy
from batchmill.errors import InvalidInput
from batchmill.optional import require
from batchmill.wire.json_bytes import join_object
from batchmill.wire.rows.result_rows import FLAT, projected

if TYPE_CHECKING:
    import pyarrow

T = TypeVar("T")

RESULTS, INPUT = "results", "input"  # the names of the tables
OPENAI_COLUMNS = (*FLAT, "id", "response")
OBJECT_BYTES_MAX = 64 * 1024 * 1024  # the longest line that DuckDB reads
CSV, LINES, PARQUET = "csv", "jsonl", "parquet"
SETTINGS = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
}
_NAMES_INPUT = re.compile(rf"\b{INPUT}\b", re.IGNORECASE)
_GUESSED = ("date", "time", "uuid")  # how the ids of types begin that DuckDB guesses of texts
_PURPOSE = "a query of results"


@contextlib.contextmanager
def connected(folder: Path) -> Iterator[Any]:
    """A connection of DuckDB whose temporary files are in a folder. Raises: InvalidInput for what DuckDB refuses."""
    duckdb = require("duckdb", _PURPOSE, InvalidInput)
    connection = duckdb.connect(config={**SETTINGS, "temp_directory": str(folder)})
    try:
        yield connection
    except duckdb.Error as error:
        raise InvalidInput(f"DuckDB: {error}", code="invalid_query") from None
    finally:
        connection.close()


def add_table(connection: Any, name: str, paths: Sequence[str], kind: str) -> None:
    """Add a view of files of one kind."""
    if kind == PARQUET:
        relation = connection.read_parquet(list(paths))
    elif kind == CSV:
        relation = connection.read_csv(list(paths), header=True, all_varchar=True)
    else:
        relation = _read_lines(connection, list(paths))
    relation.create_view(name)


def _read_lines(connection: Any, paths: list[str]) -> Any:
    """JSON lines as a relation whose texts are as they are: DuckDB reads some as dates, times or UUIDs, and writes them
    otherwise."""
    options = {"format": "newline_delimited", "maximum_object_size": OBJECT_BYTES_MAX}
    found = connection.read_json(paths, sample_size=-1, **options)
    types = [_with_texts(each) for each in found.types]
    if list(map(str, types)) == list(map(str, found.types)):
        return found
    return connection.read_json(paths, columns=dict(zip(found.columns, map(str, types), strict=True)), **options)


def _with_texts(kind: Any) -> Any:
    """The type with text in the place of what DuckDB guesses of texts."""
    duckdb = require("duckdb", _PURPOSE, InvalidInput)
    if kind.id in ("list", "map", "struct"):
        inner = {name: _with_texts(each) for name, each in kind.children}
        if kind.id == "list":
            return duckdb.list_type(inner["child"])
        return duckdb.struct_type(inner) if kind.id == "struct" else duckdb.map_type(inner["key"], inner["value"])
    return duckdb.type("VARCHAR") if kind.id.startswith(_GUESSED) else kind


def restrict(connection: Any, folder: Path, paths: Sequence[str]) -> None:
    """Let later queries read a folder and some paths, and nothing else."""
    connection.execute("SET allowed_directories = $1", [[str(folder)]])
    connection.execute("SET allowed_paths = $1", [list(paths)])
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def selected(run: Callable[[str], T | None], query: str) -> T:
    """The rows of a query. Args: run: `connection.sql` or `connection.execute`. Raises: InvalidInput if it has none."""
    if (found := run(query)) is None:
        raise InvalidInput("the query has no rows to give: it must be a SELECT", code="invalid_query")
    return found


def unique_names(names: Sequence[str]) -> list[str]:
    """Names of columns, numbered where they repeat, as DuckDB does in the files that it writes: a, a_1."""
    taken = set(names)
    found: list[str] = []
    for name in names:
        free = name if name not in found else next(each for n in count(1) if (each := f"{name}_{n}") not in taken)
        taken.add(free)
        found.append(free)
    return found


def names_input(query: str) -> bool:
    """Whether a query may read the table of the input."""
    return _NAMES_INPUT.search(query) is not None


def check_installed() -> None:
    """Raises: InvalidInput where a query could not run, before anything is copied."""
    for package in ("duckdb", "pyarrow"):
        require(package, _PURPOSE, InvalidInput)


def query_copies(query: str, copy: ResultCopy, inputs: Sequence[Path], folder: Path) -> pyarrow.Table:
    """Run a query over copies of the results and of the input, which are in `folder`."""
    with connected(folder) as connection:
        if copy.path is not None and copy.is_parquet:
            add_table(connection, RESULTS, [str(copy.path)], PARQUET)
        else:
            path, is_openai = folder / "rows.jsonl", copy.is_openai
            with path.open("wb") as file:
                for row in copy.rows():
                    columns = projected(row, OPENAI_COLUMNS) if is_openai else row
                    file.write(join_object(columns) + b"\n")
            add_table(connection, RESULTS, [str(path)], LINES)
        if inputs:
            add_table(connection, INPUT, [os.fspath(each) for each in inputs], _kind_of(inputs[0]))
        restrict(connection, folder, [])
        table = selected(connection.sql, query).to_arrow_table()
        return table.rename_columns(unique_names(table.column_names))


def _kind_of(path: Path) -> str:
    if is_parquet(path):
        return PARQUET
    return CSV if ".csv" in path.suffixes else LINES
