"""Modelbit's dialect keeps what every dialect promises, and says errors so that its published client shows them."""

from __future__ import annotations

import msgspec
import pytest
import pytest_asyncio
from contract.dialect_suite import DialectSuite, failing, known_errors
from dialects.open_server import open_server

from batchmill.dialects import load_dialects
from batchmill.dialects.modelbit.dialect import LIMITS, TYPES, ModelbitDialect, text_of
from batchmill.errors import BatchmillError, InvalidInput, ModelFailed, Unauthenticated, Unavailable
from batchmill.services.functions.names import RESERVED_NAMES
from batchmill.wire.calls import MODEL_CODES
from batchmill.wire.rows.forms import URLS

REPEATED = {429, 500, 502, 503, 504}  # by the published client, five times
TRACE = 'Traceback (most recent call last):\n  File "app.py", line 2, in f\nValueError: foo is\nnegative'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory):
    async with open_server(tmp_path_factory.mktemp("dialect")) as running:
        yield running.services


class TestModelbitDialect(DialectSuite):
    @pytest.fixture
    def dialect(self, services):
        return ModelbitDialect(services)

    def test_only_what_a_repetition_may_mend_is_repeated(self, dialect):
        """The published client repeats some statuses blindly: they are those of errors that may pass, and our bugs."""

        def flaw(error):
            status = dialect.refusal(error).status_code
            is_bug = error.blame == "system" and not error.retryable
            return f"{status} is repeated" if status in REPEATED and not error.retryable and not is_bug else ""

        assert failing(known_errors(), flaw) == {}

    def test_the_last_line_says_it(self, dialect):
        """The client raises the last line of the text: it has the kind of the error and its message."""

        def flaw(error):
            text = msgspec.json.decode(dialect.refusal(error).body)["error"]
            kind, _, message = text.split("\n")[-1].partition(": ")
            return "" if kind.isidentifier() and error.message in message else text

        assert failing(known_errors(), flaw) == {}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ModelFailed(TRACE, code="function_error"), TRACE + "\nModelFailed: negative"),
        (ModelFailed("Traceback\n  File\nKeyError: 'x'", code="function_error"), "Traceback\n  File\nKeyError: 'x'"),
        (ModelFailed("Traceback\n  File\nAssertionError", code="function_error"), "Traceback\n  File\nAssertionError"),
        (ModelFailed("no answer within 1 s", code="timeout"), "TimeoutError: no answer within 1 s"),
        (ModelFailed("7 results for 8 rows", code="bad_return"), "BadReturn: 7 results for 8 rows"),
        (InvalidInput("the body is not JSON"), "InvalidInput: the body is not JSON"),
        (Unauthenticated("no key"), "Unauthenticated: no key"),
        (
            Unavailable("8,192 requests are being answered", code="too_many_calls"),
            "RateLimitExceeded: Concurrency request count limit reached: 8,192 requests are being answered",
        ),
        (ModelFailed("it does not start:\nOSError: no disk\n"), "it does not start:\nOSError: no disk"),
    ],
    ids=lambda case: case.code if isinstance(case, BatchmillError) else None,
)
def test_texts(error, text):
    """A function's traceback stays as it is where its last line tells enough; ours are named by their kind."""
    assert text_of(error, error.message) == text


def test_other_apis_paths_are_reserved(services):
    """No deployment can be called as a first segment of a path that another API has below /v1."""
    paths = [each.path for dialect in load_dialects(services) for each in dialect.operations()]
    first = {path.split("/")[2] for path in [*paths, *URLS] if path.startswith("/v1/")}
    assert {name for name in first if not name.startswith("{")} <= RESERVED_NAMES


def test_the_tables_hold_codes_that_there_are():
    """A row for a code that nobody raises says nothing; the tables have none."""
    codes = {error.code for error in known_errors()} | MODEL_CODES
    assert {*LIMITS, *TYPES} - codes == set()
