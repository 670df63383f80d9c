"""OpenAI's dialect keeps what every dialect promises, and its own table of errors."""

from __future__ import annotations

import openai
import pytest
import pytest_asyncio
from contract.dialect_suite import DialectSuite, known_errors
from dialects.open_server import open_server

from batchmill.dialects.openai.dialect import OpenAIDialect
from batchmill.dialects.openai.errors import NAMELESS, PARAMS, UnknownParam
from batchmill.errors import Conflict, ModelFailed, Unavailable
from batchmill.server.bodies import InvalidField


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory):
    async with open_server(tmp_path_factory.mktemp("dialect")) as running:
        yield running.services


class TestOpenAIDialect(DialectSuite):
    @pytest.fixture
    def dialect(self, services):
        return OpenAIDialect(services)

    def test_the_tables_hold_codes_that_there_are(self):
        """A row for a code that nobody raises says nothing; the tables have none."""
        assert {*PARAMS, *NAMELESS} - {error.code for error in known_errors()} == set()

    def test_a_parameter_is_named(self, dialect):
        """What is wrong with one parameter names it."""
        for error in (InvalidField("no", code="invalid_value", param="limit"), UnknownParam("no", param="limit")):
            assert b'"param":"limit"' in dialect.refusal(error).body

    @pytest.mark.parametrize(
        ("error", "said"),
        [(Conflict("no"), "false"), (ModelFailed("no"), "false"), (Unavailable("later"), None)],
    )
    def test_the_package_repeats_only_what_may_help(self, dialect, error, said):
        """The openai package repeats 409 and 5xx: it is told where that is no use."""
        assert dialect.refusal(error).headers.get("x-should-retry") == said
        assert openai.DEFAULT_MAX_RETRIES > 0
