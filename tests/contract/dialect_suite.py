"""What every dialect promises: subclass DialectSuite and give it the dialect."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import jsonschema_rs
import msgspec
import pytest
from starlette.responses import Response

import batchmill
from batchmill import errors
from batchmill.errors import BatchmillError, RateLimited
from batchmill.server.operations import Content, Dialect

SOURCE = Path(batchmill.__file__).parent
# Raised to callers of a server by these; what only a command line says needs no row of its own.
FRONTENDS = ("services", "server", "dialects", "jobs", "datasets", "engines", "store", "wire")
STATUS = (  # of a class of errors, whatever a dialect calls it
    (errors.Gone, {404, 410}),
    (errors.UnknownName, {404}),
    (errors.TooLarge, {400, 413}),
    (errors.Conflict, {400, 409, 422}),
    (errors.InvalidInput, {400, 404, 405, 408, 409, 413, 415, 416, 422}),
    (errors.Unauthenticated, {401}),
    (errors.Forbidden, {403}),
    (errors.RateLimited, {429}),
    (errors.Unavailable, {503}),
    (errors.StorageFull, {503, 507}),
    (errors.JobPaused, {409, 429, 500, 502, 503}),  # of a live request: the service refused us, not its caller
)


@cache
def known_errors() -> list[BatchmillError]:
    """One error of every class, and one for each code that the source gives a class by name."""
    classes = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, BatchmillError)]
    by_name = {kind.__name__: kind for kind in classes}
    pairs = {(kind, kind.code) for kind in classes}
    paths = [path for path in sorted(SOURCE.rglob("*.py")) if path.relative_to(SOURCE).parts[0] in FRONTENDS]
    may_name = re.compile(rf"\bcode=\s*[\"']|^class \w+\(.*\b({'|'.join(by_name)})\b", re.MULTILINE)
    trees = [ast.parse(text) for path in paths if may_name.search(text := path.read_text())]
    for tree in trees:
        by_name |= _own_classes(tree, by_name)
    for tree in trees:
        pairs |= {(by_name[name], code) for name, code in _codes(tree) if name in by_name}
    return [_error(kind, code) for kind, code in sorted(pairs, key=lambda pair: (pair[0].__name__, pair[1]))]


def _own_classes(tree: ast.Module, by_name: dict[str, type[BatchmillError]]) -> dict[str, type[BatchmillError]]:
    """Errors that a module derives for its own use, by the class of the tree they stand for."""
    defined = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.bases]
    bases = {node.name: ast.unparse(node.bases[0]).rsplit(".", 1)[-1] for node in defined}
    return {name: by_name[base] for name, base in bases.items() if base in by_name}


def _codes(tree: ast.Module) -> set[tuple[str, str]]:
    """(class, code) of every `Class(…, code="…")` of a module."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (codes := [each.value for each in node.keywords if each.arg == "code"]):
            name = ast.unparse(node.func).rsplit(".", 1)[-1]
            found |= {(name, code.value) for code in codes if isinstance(code, ast.Constant)}
    return found


def _error(kind: type[BatchmillError], code: str) -> BatchmillError:
    error = RateLimited("too many", retry_after_s=2.5) if kind is RateLimited else kind("what is wrong with 'x'")
    error.code = code
    return error


def failing(cases: Iterable[BatchmillError], flaw: Callable[[BatchmillError], str]) -> dict[str, str]:
    """What is wrong with each error for which `flaw` finds something, by the error's class and code."""
    found = {f"{type(error).__name__} {error.code}": flaw(error) for error in cases}
    return {name: why for name, why in found.items() if why}


class DialectSuite:
    @pytest.fixture
    def dialect(self) -> Dialect:
        """The dialect under test."""
        raise AssertionError("a suite gives its own dialect")

    def test_codes_were_found(self):
        """The rules below look at every code of the source, not at a few."""
        assert len(known_errors()) > 50

    def test_every_code_has_an_answer(self, dialect: Dialect):
        """Each code becomes a status of its class and an envelope that the document describes, with the message."""
        document = jsonschema_rs.validator_for(dialect.error_schema())
        assert failing(known_errors(), lambda error: self.flaw_of(dialect.refusal(error), error, document)) == {}

    def flaw_of(self, reply: Response, error: BatchmillError, document: jsonschema_rs.Validator) -> str:
        """What is wrong with the reply that an error became; a dialect adds what its clients need."""
        allowed = next((status for kind, status in STATUS if isinstance(error, kind)), None)
        is_callers = 400 <= reply.status_code < 500
        is_fair = error.blame == "model" or is_callers == (error.blame == "caller")
        if reply.status_code not in allowed if allowed else not is_fair:
            return f"the status {reply.status_code}"
        if not document.is_valid(msgspec.json.decode(reply.body)):
            return f"an envelope that is not documented: {reply.body!r}"
        words = self.fixed_words().get(error.code, error.message)
        return "" if words in bytes(reply.body).decode() else f"no message: {reply.body!r}"

    def test_who_asks_too_often_hears_when_to_come_again(self, dialect: Dialect):
        """A limit that was reached says after how many whole seconds it no longer is."""
        reply = dialect.refusal(RateLimited("too many", retry_after_s=2.5))
        assert reply.headers["retry-after"] == "3"

    def test_text_of_any_kind_fits_into_an_error(self, dialect: Dialect):
        """Quotes, control characters and line ends in a message break neither the body nor a header."""
        reply = dialect.refusal(errors.UnknownName('no "x"\r\nset-cookie: y\0', code="unknown_job"))
        assert msgspec.json.decode(bytes(reply.body))
        assert "set-cookie" not in reply.headers

    def test_operations_have_names_of_their_own(self, dialect: Dialect):
        """Names, and methods of paths, are unique: they are what the document and clients go by."""
        operations = dialect.operations()
        assert len({each.name for each in operations}) == len(operations) > 0
        assert len({(each.method, each.path) for each in operations}) == len(operations)

    def test_operations_refuse_what_they_do_not_know(self, dialect: Dialect):
        """No body and no query takes a field that would be ignored."""
        for each in dialect.operations():
            for struct in (each.query, each.body):
                if struct is not None and not isinstance(struct, Content):
                    assert struct.__struct_config__.forbid_unknown_fields, f"{each.name}: {struct.__name__}"

    def test_what_changes_something_needs_more_than_to_read(self, dialect: Dialect):
        """Only looking is open to a key that may only read."""
        for each in dialect.operations():
            if each.method not in ("GET", "HEAD") and each.scope is not None:
                assert each.scope != "read" or each.name in self.reading_posts(), each.name

    @staticmethod
    def reading_posts() -> frozenset[str]:
        """Operations that are not a GET although they change nothing."""
        return frozenset()

    @staticmethod
    def fixed_words() -> dict[str, str]:
        """Code -> the words that its API has for it, and no others."""
        return {}
