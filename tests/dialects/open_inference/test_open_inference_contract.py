"""The Open Inference dialect keeps what every dialect promises, and its own table of statuses."""

from __future__ import annotations

import msgspec
import pytest
import pytest_asyncio
from contract.dialect_suite import DialectSuite
from dialects.open_server import open_server

from batchmill.dialects.open_inference.dialect import OpenInferenceDialect
from batchmill.errors import InvalidInput, ModelFailed, UnknownName


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory):
    async with open_server(tmp_path_factory.mktemp("dialect")) as running:
        yield running.services


class TestOpenInferenceDialect(DialectSuite):
    @pytest.fixture
    def dialect(self, services):
        return OpenInferenceDialect(services)

    @staticmethod
    def reading_posts():
        return frozenset({"getModelRepository"})

    @staticmethod
    def fixed_words():
        return {"unknown_url": "Not Found", "method_not_allowed": "Method Not Allowed"}

    @pytest.mark.parametrize(
        ("error", "status"),
        [
            (InvalidInput("no", code="shape_mismatch"), 400),
            (UnknownName("no", code="model_not_found"), 404),
            (ModelFailed("ValueError: no", code="function_error"), 500),
            (ModelFailed("it returned 7 results for 8 rows", code="bad_return"), 500),
            (ModelFailed("too late", code="timeout"), 504),
        ],
    )
    def test_an_error_is_one_sentence(self, dialect, error, status):
        """The envelope holds the message and nothing else; what a model did is a status of 500 or more."""
        reply = dialect.refusal(error)
        assert (reply.status_code, msgspec.json.decode(reply.body)) == (status, {"error": error.message})

    def test_folders_of_the_server_are_not_told(self, dialect, services):
        """A traceback names files as they are called, not where they lie."""
        path = services.config.data_dir / "models" / "app.py"
        reply = dialect.refusal(ModelFailed(f'File "{path}"', code="function_error"))
        assert str(services.config.data_dir) not in reply.body.decode()
