"""Which variables of a server's environment its workers get."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchmill.engines.llm.engine import LlmEngine
from batchmill.models import redaction, worker_environment
from batchmill.models.runtime_process import PreparedRuntime
from batchmill.models.worker_environment import FETCHERS, inherited, lend, of_helpers, of_worker
from batchmill.types import Connector, ModelSpec

NAMES = (
    *("PATH", "LC_ALL", "PYTHONPATH", "https_proxy", "CUDA_HOME", "HF_TOKEN", "HF_HOME", "VLLM_LOGGING_LEVEL"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_REGION", "GOOGLE_APPLICATION_CREDENTIALS", "OPENAI_API_KEY", "DATABASE_URL"),
    *("BATCHMILL_API_KEY", "PATHS", "ACME_KEY"),
)
OURS = dict.fromkeys(NAMES, "x")
ALWAYS = {"PATH", "LC_ALL", "PYTHONPATH"}
AWS = {"AWS_SECRET_ACCESS_KEY", "AWS_REGION"}


def test_each_engine_gets_what_it_heeds() -> None:
    """Keys of clouds and hubs go only to the engines that look for them where no other key is named, and what nobody
    knows goes to none."""
    keyed = {"access_key": "env:A", "secret_key": "env:B"}
    strange = Connector("c", "c", "1", "aws_sigv4", [])
    code = {"https_proxy", "CUDA_HOME", "HF_HOME"}
    vllm = {"https_proxy", "CUDA_HOME", "HF_TOKEN", "HF_HOME", "VLLM_LOGGING_LEVEL"}
    cases = [
        (ModelSpec("m", "http", "s"), set()),
        (ModelSpec("m", "connector", "s"), set()),
        (ModelSpec("m", "function", "s"), code),
        (ModelSpec("m", "function_process", "s"), code),
        (ModelSpec("m", "llm", "org/name"), vllm),
        (ModelSpec("m", "llm", "s3://b/m"), vllm | AWS),
        (ModelSpec("m", "provider_batch", "s", provider="openai"), set()),
        (ModelSpec("m", "provider_batch", "s", provider="bedrock"), AWS | {"https_proxy"}),
        (ModelSpec("m", "provider_batch", "s", provider="bedrock", engine_args=keyed), {"AWS_REGION"}),
        (ModelSpec("m", "provider_batch", "s", provider="bedrock", connector=strange), {"AWS_REGION"}),
    ]
    for model, more in cases:
        assert of_worker(model, OURS).keys() == ALWAYS | more, model


def test_more_is_what_the_configuration_names() -> None:
    """A name is one variable, a beginning all that begin so."""
    model = ModelSpec("m", "http", "s")
    assert of_worker(model, OURS, ["ACME_*", "DATABASE_URL"]).keys() == ALWAYS | {"ACME_KEY", "DATABASE_URL"}


def test_helpers_get_no_keys() -> None:
    """A child that only reads and checks gets no key at all; one that fetches, those of hubs and object stores."""
    assert of_helpers(OURS).keys() == ALWAYS | {"HF_HOME"}
    stores = {"https_proxy", "HF_TOKEN", "HF_HOME", "GOOGLE_APPLICATION_CREDENTIALS", *AWS}
    assert of_helpers(OURS, FETCHERS).keys() == ALWAYS | stores


async def test_what_is_lent_to_a_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials of the store reach the worker's own clients, and neither functions nor model servers."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    prepared = PreparedRuntime.__new__(PreparedRuntime)
    prepared._environ = dict(os.environ)
    before = set(os.environ)
    monkeypatch.setattr(worker_environment, "_lent", set())
    lend({"AWS_SECRET_ACCESS_KEY": "a secret of the store", "AWS_REGION": "r", "PATH": "/other"})
    try:
        assert os.environ["AWS_REGION"] == "r" and os.environ["PATH"] != "/other"
        assert set(inherited()) == before and not prepared.changed_environ()
        assert "AWS_REGION" not in LlmEngine(ModelSpec("m", "llm", "org/name"), tmp_path)._env
        assert "secret" not in redaction.mask("it said: a secret of the store")
    finally:
        for name in os.environ.keys() - before:
            del os.environ[name]
