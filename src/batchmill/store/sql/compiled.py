"""Statements that are compiled once for each dialect: those that every small job runs.

SQLAlchemy takes 20 to 100 us to execute a statement of which SQLite needs 4 to 20. Here SQLite's own connection
executes it; on PostgreSQL, where a statement waits for the server anyway, SQLAlchemy executes the text. Transactions
and errors are SQLAlchemy's on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.sql.compiler import SQLCompiler

from batchmill.store.sql.transactions import note_statement

Parameters = Mapping[str, Any]
Build = Callable[[str], sa.Executable]  # a statement for the dialect of this name
_Processor = Callable[[Any], Any]


class CompiledStatement:
    """A SELECT, INSERT, UPDATE or DELETE of SQLAlchemy Core, whose parameters all have names.

    One of them may expand, for an IN. Concurrency: any thread, each with its own connection.
    """

    def __init__(self, statement: sa.Executable | Build, columns: Sequence[str] | None = None) -> None:
        """Args:
        statement: or what builds it for a dialect.
        columns: of an INSERT without values: those that its parameters have. Other columns get their defaults.
        """
        self._statement, self._columns = statement, columns
        self._forms: dict[str, _Form] = {}  # by dialect

    def run(self, db: sa.Connection, parameters: Parameters) -> int:
        """Execute it. Returns the number of rows that were changed."""
        return self._form(db).execute(db, parameters).rowcount

    def run_all(self, db: sa.Connection, parameters: Sequence[Parameters]) -> int:
        """Execute it with each of the parameters. Returns the number of rows that were changed in all."""
        if not parameters:
            return 0  # PostgreSQL's driver would execute it once, without any
        return self._form(db).execute_all(db, parameters).rowcount

    def rows(self, db: sa.Connection, parameters: Parameters) -> list[tuple[Any, ...]]:
        """Execute it. Returns the rows that it finds, or that RETURNING names."""
        form = self._form(db)
        return form.fetch(form.execute(db, parameters))

    def row(self, db: sa.Connection, parameters: Parameters) -> tuple[Any, ...] | None:
        """As `rows`: the first one."""
        found = self.rows(db, parameters)
        return found[0] if found else None

    def record(self, db: sa.Connection, parameters: Parameters) -> dict[str, Any] | None:
        """As `row`, by the names of the columns."""
        found = self.row(db, parameters)
        return None if found is None else dict(zip(self._form(db).columns, found, strict=True))

    def _form(self, db: sa.Connection) -> _Form:
        form = self._forms.get(db.dialect.name)
        if form is None:
            statement = self._statement
            built = statement(db.dialect.name) if callable(statement) else statement
            form = self._forms[db.dialect.name] = _Form(db.dialect, built, self._columns)
        return form


class _Form:
    """A statement of one dialect."""

    def __init__(self, dialect: sa.Dialect, statement: sa.Executable, columns: Sequence[str] | None) -> None:
        assert isinstance(statement, sa.Select | sa.Insert | sa.Update | sa.Delete), f"{statement} is not supported"
        names = None if columns is None else list(columns)
        self._compiled = cast(SQLCompiler, statement.compile(dialect=dialect, column_keys=names))
        expanding = [name for name, bind in self._compiled.binds.items() if bind.required and bind.expanding]
        assert len(expanding) <= 1, "more than one parameter expands"
        self._expanding = expanding[0] if expanding else None
        self._texts: dict[int, _Text] = {}  # by the number of values of the parameter that expands
        self._changes = not isinstance(statement, sa.Select)
        # The driver gives the interpreter's lock away for the id of each row that `execute` inserts.
        self._has_no_id = isinstance(statement, sa.Insert) and not statement.exported_columns
        self._is_direct = dialect.name == "sqlite"
        self._driver_error = dialect.loaded_dbapi.Error
        found = list(statement.exported_columns)
        self.columns = [column.key for column in found]
        self._readers = list(_readers(found, dialect)) if self._is_direct else []  # PostgreSQL's driver knows its types

    def execute(self, db: sa.Connection, parameters: Parameters) -> Any:
        """The driver's cursor, or what SQLAlchemy has in its place."""
        sql, values = self._prepared(parameters)
        if not self._is_direct or not db.in_transaction():  # SQLAlchemy begins one
            return db.exec_driver_sql(sql, values)
        if self._changes:
            note_statement(db)
        try:
            driver = _driver_of(db)
            return driver.executemany(sql, (values,)) if self._has_no_id else driver.execute(sql, values)
        except self._driver_error as error:
            raise self._as_sqlalchemy(db, sql, values, error) from error

    def execute_all(self, db: sa.Connection, parameters: Sequence[Parameters]) -> Any:
        """As `execute`, with each of the parameters."""
        assert self._expanding is None, "a parameter expands"
        sql, values = self._text({}).sql, [self._prepared(each)[1] for each in parameters]
        if not self._is_direct or not db.in_transaction():
            return db.exec_driver_sql(sql, values)
        note_statement(db)
        try:
            return _driver_of(db).executemany(sql, values)
        except self._driver_error as error:
            raise self._as_sqlalchemy(db, sql, values, error) from error

    def fetch(self, cursor: Any) -> list[tuple[Any, ...]]:
        """The rows of a result, all of them: a statement that is not at its end would keep its transaction open."""
        rows = cursor.fetchall()
        if not self._is_direct:
            return [tuple(row) for row in rows]
        return [self._read(row) for row in rows] if self._readers else rows

    def _read(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        values = list(row)
        for index, read in self._readers:
            values[index] = read(values[index])
        return tuple(values)

    def _prepared(self, parameters: Parameters) -> tuple[str, Any]:
        """The text, and the parameters as the driver takes them."""
        if self._expanding is not None:
            parameters = {**parameters, self._expanding: _padded(parameters[self._expanding])}
        text = self._texts.get(0 if self._expanding is None else len(parameters[self._expanding]))
        if text is None:
            text = self._text(parameters)
        return text.sql, text.values(parameters)

    def _text(self, parameters: Parameters) -> _Text:
        count = 0 if self._expanding is None else len(parameters[self._expanding])
        if count not in self._texts:
            self._texts[count] = _Text(self._compiled, self._expanding, parameters)
        return self._texts[count]

    def _as_sqlalchemy(self, db: sa.Connection, sql: str, values: Any, error: Exception) -> BaseException:
        """The error that SQLAlchemy would raise. A connection to a file is never lost."""
        return sa.exc.DBAPIError.instance(
            sql, values, error, self._driver_error, hide_parameters=db.engine.hide_parameters, dialect=db.dialect,
            ismulti=isinstance(values, list),
        )  # fmt: skip


class _Text:
    """The text of a statement, with a place for each value."""

    def __init__(self, compiled: SQLCompiler, expanding: str | None, parameters: Parameters) -> None:
        asked = {name for name, bind in compiled.binds.items() if bind.required}
        state = compiled.construct_expanded_state({**dict.fromkeys(asked), **parameters})
        self.sql, self._expanding = state.statement, expanding
        self._is_positional = state.positiontup is not None
        self._names = list(state.parameters if state.positiontup is None else state.positiontup)
        self._expanded = state.parameter_expansion.get(expanding or "", [])
        self._takes_tuples = len(self._expanded) > len(parameters[expanding]) if expanding else False
        self._constants = {name: value for name, value in state.parameters.items() if name not in asked}
        self._constants |= {column.key: _default(column) for column in compiled.insert_prefetch}
        processors = [(index, state.processors.get(name)) for index, name in enumerate(self._names)]
        self._processors = [(index, cast(_Processor, process)) for index, process in processors if process is not None]

    def values(self, parameters: Parameters) -> Any:
        known = {**self._constants, **parameters} if self._constants else parameters
        if self._expanding is not None:
            wanted = parameters[self._expanding]
            flat = chain.from_iterable(wanted) if self._takes_tuples else wanted
            known = {**known, **dict(zip(self._expanded, flat, strict=True))}
        values = [known[name] for name in self._names]
        for index, process in self._processors:
            values[index] = process(values[index])
        return tuple(values) if self._is_positional else dict(zip(self._names, values, strict=True))


def _padded(values: Sequence[Any]) -> Sequence[Any]:
    """Values of an IN, the last one as often as makes their number a power of two: there are few such statements."""
    if not values:
        return values
    count = 1 << (len(values) - 1).bit_length()
    return [*values, *[values[-1]] * (count - len(values))]


def _readers(columns: Sequence[sa.ColumnElement[Any]], dialect: sa.Dialect) -> Iterator[tuple[int, _Processor]]:
    """Index of a column -> what its type makes of the driver's values, if it changes them."""
    for index, column in enumerate(columns):
        read = column.type.dialect_impl(dialect).result_processor(dialect, None)
        if read is not None:
            yield index, read


def _default(column: sa.Column[Any]) -> Any:
    default = column.default
    assert isinstance(default, sa.ColumnDefault) and default.is_scalar, f"{column} has no constant default"
    return default.arg


def _driver_of(db: sa.Connection) -> Any:
    return db.connection.driver_connection
