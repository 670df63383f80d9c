"""Replicas and the machine in the configuration: read, resolved, refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchmill import config
from batchmill.config import Config
from batchmill.errors import InvalidConfig, InvalidInput
from batchmill.models.registry import ModelFlags, resolve
from batchmill.types import ModelSpec, Needs, Scaling
from batchmill.types.machines import size_of, size_text

GIB = 2**30


def load(folder: Path, text: str) -> Config:
    (folder / "batchmill.toml").write_text(text)
    return config.load(environ={"HOME": str(folder)}, cwd=folder)


def model(folder: Path, settings: str, engine: str = "vllm", flags: ModelFlags = ModelFlags()) -> ModelSpec:
    (folder / "tiny").mkdir(exist_ok=True)
    (folder / "app.py").write_text("def f(n):\n    return n\n")
    source = {"vllm": "tiny", "function": "app.py:f", "openai": "m"}[engine]
    found = load(folder, f"[models.m]\nengine = '{engine}'\nsource = '{source}'\n{settings}")
    return resolve("m", found, cwd=folder, flags=flags)


@pytest.mark.parametrize(
    ("expected", "size"),
    [
        (1024, 1024), ("1024", 1024), ("24GiB", 24 * GIB), ("24 gib", 24 * GIB), ("1.5GiB", 3 * GIB // 2),
        ("24GB", 24 * 10**9), ("512M", 512 * 10**6), ("2TiB", 2**41), ("7 KiB", 7168),
    ],
)  # fmt: skip
def test_sizes_are_read(expected, size):
    """A number of bytes, or one with a unit, binary or decimal."""
    assert size_of(expected) == size


@pytest.mark.parametrize("expected", ["", "GiB", "-1", 0, "24 parsecs", "1e3", 2**60])
def test_what_is_no_size_is_named(expected):
    with pytest.raises(InvalidConfig, match="machine.memory must be a number of bytes or like"):
        size_of(expected, "machine.memory")


@pytest.mark.parametrize(
    ("size", "text"), [(24 * GIB, "24 GiB"), (3 * GIB // 2, "1.5 GiB"), (300 * 2**20, "300 MiB"), (5, "5 bytes")]
)
def test_sizes_are_shown(size, text):
    assert size_text(size) == text


def test_a_models_replicas_are_resolved(tmp_path):
    """What is said of replicas, of what each needs and of secrets arrives in the model."""
    text = "replicas_min = 1\nreplicas_max = 4\ncooldown_s = 30\nscale_up_requests = 64\nmemory = '12GiB'\ngpus = 2\n"
    text += "limits = { adapters_max = 8 }\nsecrets = { HF_TOKEN = 'file:token', KEY = 'secret:k' }\n"
    found = model(tmp_path, text)
    assert found.scaling == Scaling(1, 4, 30.0, 64) and found.needs == Needs(12 * GIB, 2)
    assert found.secrets == {"HF_TOKEN": f"file:{tmp_path / 'token'}", "KEY": "secret:k"}
    assert (found.limits.adapters_max, found.workers) == (8, 1)


@pytest.mark.parametrize(
    ("text", "scaling"),
    [
        ("", None),
        ("workers = 3", None),
        ("cooldown_s = 5", Scaling(cooldown_s=5.0)),
        ("replicas_min = 2", Scaling(2, 2)),
        ("replicas_max = 3", Scaling(0, 3)),
    ],
)
def test_what_is_not_said_has_a_default(tmp_path, text, scaling):
    """Without a word about replicas there is a fixed number; a least without a most is the most too."""
    assert model(tmp_path, text, "function").scaling == scaling


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replicas_min = -1", r"models\.m\.replicas_min must be 0 to 1,024, not -1"),
        ("replicas_max = 0", r"models\.m\.replicas_max must be 1 to 1,024, not 0"),
        ("replicas_min = 3\nreplicas_max = 2", "replicas_min = 3 is more than replicas_max = 2"),
        ("cooldown_s = -1", r"models\.m\.cooldown_s must be 0 to"),
        ("cooldown_s = nan", r"models\.m\.cooldown_s must be 0 to"),
        ("scale_up_requests = 0", r"models\.m\.scale_up_requests must be 1 to"),
        ("gpus = 1025", r"models\.m\.gpus must be 0 to 1,024, not 1025"),
        ("memory = 'much'", r"models\.m\.memory must be a number of bytes or like \"24GiB\", not 'much'"),
        ("workers = 2\nreplicas_max = 3", "workers is fixed and replicas_min to replicas_max a range"),
        ("replica_max = 3", r"did you mean models\.m\.replicas_max"),
        ("limits = { adapters_max = 0 }", r"models\.m\.limits\.adapters_max must be more than 0"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, text, expected):
    """A number out of range, a range upside down, two ways to say one thing: refused by name."""
    with pytest.raises(InvalidConfig, match=expected):
        model(tmp_path, text)


@pytest.mark.parametrize("text", ["replicas_max = 2", "cooldown_s = 5", "gpus = 1", "memory = 5"])
def test_a_service_has_no_replicas(tmp_path, text):
    """A setting that a remote service does not use is refused."""
    with pytest.raises(InvalidInput, match=f"'openai' does not use {text.split()[0]}"):
        model(tmp_path, text, "openai")


def test_secrets_are_references(tmp_path):
    """A secret that was pasted is refused, and not repeated; other engines take none."""
    with pytest.raises(InvalidInput, match=r"secrets\.HF_TOKEN must be \"env:NAME\"") as refused:
        model(tmp_path, "secrets = { HF_TOKEN = 'hf_pasted' }")
    assert "hf_pasted" not in str(refused.value)
    with pytest.raises(InvalidInput, match="does not use secrets"):
        model(tmp_path, "secrets = { A = 'env:A' }", "function")


def test_a_flag_does_not_undo_a_range(tmp_path):
    """--workers beside a configured range is refused."""
    with pytest.raises(InvalidInput, match="'m' 0 to 3 replicas"):
        model(tmp_path, "replicas_max = 3", flags=ModelFlags(workers=2))


def test_the_machine_is_read(tmp_path):
    """Memory with its unit, GPUs as a count or by their ids."""
    found = load(tmp_path, "[machine]\nmemory = '24GiB'\ngpus = [0, 'MIG-1']").machine
    assert (found.memory_bytes, found.gpus) == (24 * GIB, [0, "MIG-1"])
    assert load(tmp_path, "[machine]\ngpus = 2").machine.gpus == 2
    assert load(tmp_path, "").machine.memory_bytes is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("memory = 0", r"machine\.memory must be a number of bytes"),
        ("gpus = -1", r"machine\.gpus must be 0 to 1,024, not -1"),
        ("gpus = [0, '0']", r"machine\.gpus lists a device twice"),
        ("gpu = 1", r"there is no key machine\.gpu; did you mean machine\.gpus"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(tmp_path, text, expected):
    with pytest.raises(InvalidConfig, match=expected):
        load(tmp_path, f"[machine]\n{text}")
