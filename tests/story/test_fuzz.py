"""A fuzz run over the document that a real server serves: no request makes it fail, every reply is as told."""

from __future__ import annotations

import re
import subprocess
import sys

import httpx2
import hypothesis
import pytest
import schemathesis
from fakes.running_server import running_server
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

LEAK = re.compile(r'Traceback|sqlite|sqlalchemy|SELECT |INSERT |File "|/data/(files|jobs)/|site-packages')
EXAMPLES = 5  # of each operation, of each kind: the same in every run
PARTS = 6  # that the operations are divided into: each has its own time
# Not: whether what fits the schema is accepted (a file must exist, too), and what a request without a key is told.
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
    checks.allow_header_conformance,
]
CONFIG = """
[models.echo]
engine = "function"
source = "app.py:echo"
"""
CODE = """
def echo(**body):
    return {"echo": sorted(body)}
"""


@schemathesis.serializer("application/vnd.batchmill.bundle+gzip", "application/vnd.batchmill.adapter+gzip")
def as_it_is(context, value):
    """Bytes of an archive, and whatever else is sent in its place."""
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "app.py").write_text(CODE)
    with running_server(folder, CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def key(server):
    """Of the widest scope: what it may not do is not a finding."""
    line = [sys.executable, "-m", "batchmill", "--data-dir", str(server.data_dir), "keys", "create", "--name", "fuzz"]
    return subprocess.run([*line, "--scope", "admin"], capture_output=True, text=True, check=True).stdout.strip()


def fuzz(operation: schemathesis.schemas.APIOperation, key: str, mode: GenerationMode) -> str:
    """What is wrong with the replies of an operation to what fits its description, or does not; empty: nothing."""

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False, verbosity=Verbosity.quiet,
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        reply = case.call_and_validate(timeout=30, headers={"Authorization": f"Bearer {key}"}, checks=CHECKS)

        if result := LEAK.search(reply.text):
            raise AssertionError(f"{operation.label} told {result[0]!r}")

    try:
        ask()
    except hypothesis.errors.Unsatisfiable:
        return ""  # an operation that nothing can be wrong with
    except (schemathesis.errors.SchemathesisError, FailureGroup, Failure) as error:
        return f"{operation.label}: {error}"
    return ""


@pytest.fixture(scope="module")
def operations(server):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    found = [each.ok() for each in schema.get_all_operations()]
    assert len(found) > 40
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(PARTS))
def test_operations(operations, key, part):
    """Whatever is asked, the answer is not a failure of the server, and of the status, type and form that were told."""
    mine = operations[part::PARTS]
    found = [result for each in mine for mode in GenerationMode if (result := fuzz(each, key, mode))]
    assert not found, "\n\n".join(found)


def test_the_server_is_still_well(server):
    """After the fuzz run the server answers, and its log has no trace of an error."""
    assert httpx2.get(f"{server.url}/health").json()["status"] == "ok"
    assert [line for line in server.logged() if "trace" in line] == []
    statuses = {line.get("status", 0) // 100 for line in server.logged()}
    assert {2, 4} <= statuses and 5 not in statuses
