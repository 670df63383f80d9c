"""The Predibase dialect keeps what every dialect promises."""

from __future__ import annotations

import pytest
import pytest_asyncio
from contract.dialect_suite import DialectSuite
from dialects.open_server import open_server

from batchmill.dialects.predibase.dialect import PredibaseDialect
from batchmill.errors import Refused


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory):
    async with open_server(tmp_path_factory.mktemp("dialect")) as running:
        yield running.services


class TestPredibaseDialect(DialectSuite):
    @pytest.fixture
    def dialect(self, services):
        return PredibaseDialect(services)

    @pytest.mark.parametrize(("code", "status"), [("link_altered", 403), ("link_expired", 410), ("link_used", 410)])
    def test_links_that_do_not_hold(self, dialect, code, status):
        """What was altered is forbidden, what held once is gone; neither is a status that the client repeats."""
        assert dialect.refusal(Refused("no", code=code)).status_code == status

    def test_who_asks_gets_exactly_200(self, dialect):
        """The client takes any other status of this call for a failure."""
        [request] = [each for each in dialect.operations() if each.path == "/users/current"]
        assert (request.status, request.also) == (200, {})
