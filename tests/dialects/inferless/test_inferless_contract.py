"""The Inferless dialect keeps what every dialect promises."""

from __future__ import annotations

import pytest
import pytest_asyncio
from contract.dialect_suite import DialectSuite
from dialects.open_server import open_server

from batchmill.dialects.inferless import InferlessDialect
from batchmill.errors import ModelFailed


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory):
    async with open_server(tmp_path_factory.mktemp("dialect")) as running:
        yield running.services


class TestInferlessDialect(DialectSuite):
    @pytest.fixture
    def dialect(self, services):
        return InferlessDialect(services)

    def test_a_success_is_exactly_200(self, dialect):
        """The client takes any other status for a failure."""
        assert {(each.status, tuple(each.also)) for each in dialect.operations()} == {(200, ())}

    def test_an_app_that_fails_is_a_server_error(self, dialect):
        """What user code raised comes with its traceback and a status that says that the caller is not to blame."""
        reply = dialect.refusal(ModelFailed("Traceback\nValueError: no", code="function_error"))
        assert reply.status_code == 500 and reply.body == b'{"error":"Traceback\\nValueError: no"}'
