"""What every dialect promises, of batchmill's own."""

import pytest
from contract.dialect_suite import DialectSuite
from dialects.native.native_kit import Kit

from batchmill.dialects.native.dialect import NativeDialect


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    kit = Kit(tmp_path_factory.mktemp("native"))
    yield kit
    kit.close()


class TestNativeDialect(DialectSuite):
    @pytest.fixture
    def dialect(self, kit):
        return NativeDialect(kit.services)

    def test_paths_begin_with_its_own_prefix(self, dialect):
        """Nothing of this API lies where another's does."""
        assert all(each.path.startswith("/batchmill/v1/") for each in dialect.operations())
