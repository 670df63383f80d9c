"""The dialect of ML Commons keeps what every dialect promises."""

from __future__ import annotations

import msgspec
import pytest
import pytest_asyncio
from contract.dialect_suite import DialectSuite
from dialects.open_server import open_server

from batchmill.dialects.ml_commons.dialect import TEXTS, MlCommonsDialect
from batchmill.dialects.ml_commons.predict import RemoteAnswered
from batchmill.errors import UnknownName
from batchmill.types import Scope


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory):
    async with open_server(tmp_path_factory.mktemp("dialect")) as running:
        yield running.services


class TestMlCommonsDialect(DialectSuite):
    @pytest.fixture
    def dialect(self, services):
        return MlCommonsDialect(services)

    @staticmethod
    def fixed_words():
        return TEXTS

    @staticmethod
    def reading_posts():
        searched = ("Connectors", "Models", "ModelGroups", "Tasks")
        return frozenset(f"search{each}ByPost" for each in searched)

    def test_what_belongs_to_everybody_needs_an_administrator(self, dialect):
        """Connectors, models and groups are written by administrators; batches and calls by whoever may submit."""
        for each in dialect.operations():
            if each.method in ("POST", "PUT", "DELETE") and each.name not in self.reading_posts():
                is_work = "redict" in each.name or "Task" in each.name
                assert each.scope == (Scope.SUBMIT if is_work else Scope.ADMIN), each.name

    def test_every_path_takes_a_last_slash(self, dialect):
        """opensearch-py-ml sends one where OpenSearch ignores it."""
        assert all(each.last_slash_is_optional for each in dialect.operations() if each.path != "/")

    def test_a_remote_error_has_its_own_status(self, dialect):
        """What a remote service answered comes with its status, and in the envelope that clients read."""
        reply = dialect.refusal(RemoteAnswered("Error from remote service: busy", 429))
        response = msgspec.json.decode(reply.body)
        cause = {"type": "status_exception", "reason": "Error from remote service: busy"}
        assert (reply.status_code, response) == (429, {"error": {"root_cause": [cause], **cause}, "status": 429})

    def test_an_unknown_task_reads_as_upstream(self, dialect):
        """The envelope of the reference's section 6."""
        reply = msgspec.json.decode(dialect.refusal(UnknownName("Failed to find task", code="unknown_task")).body)
        cause = {"type": "status_exception", "reason": "Failed to find task"}
        assert reply == {"error": {"root_cause": [cause], **cause}, "status": 404}
