"""Keys are found where a reference says, and shown to nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchmill.errors import ModelFailed
from batchmill.models import secrets
from batchmill.models.secrets import resolve
from batchmill.types import Provision


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "env:NAME" is the variable's value, without the line end that shells leave."""
    monkeypatch.setenv("SOME_KEY", "s3cret\n")
    assert resolve("env:SOME_KEY").reveal() == "s3cret"


def test_file(tmp_path: Path) -> None:
    """ "file:PATH" is the file's one line."""
    (tmp_path / "key").write_text("s3cret\n")
    assert resolve(f"file:{tmp_path}/key").reveal() == "s3cret"


def test_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is missing or empty is named in the error."""
    monkeypatch.delenv("NO_KEY", raising=False)
    monkeypatch.setenv("EMPTY_KEY", " ")
    for reference, name in (("env:NO_KEY", "NO_KEY"), ("env:EMPTY_KEY", "EMPTY_KEY"), (f"file:{tmp_path}/no", "no")):
        with pytest.raises(ModelFailed, match=name) as caught:
            resolve(reference)
        assert caught.value.code == "missing_secret"


def test_pasted_key_is_not_repeated() -> None:
    """A key that was pasted where its name belongs is refused without being shown."""
    with pytest.raises(ModelFailed) as caught:
        resolve("sk-abcdef")
    assert "abcdef" not in caught.value.message


def test_two_lines_are_no_key(tmp_path: Path) -> None:
    """A key that would break a header is refused."""
    (tmp_path / "key").write_text("one\ntwo")
    with pytest.raises(ModelFailed, match="one line"):
        resolve(f"file:{tmp_path}/key")


def test_secret_hides_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Printing a secret, however it is done, prints stars."""
    monkeypatch.setenv("SOME_KEY", "s3cret")
    secret = resolve("env:SOME_KEY")
    assert "s3cret" not in f"{secret} {secret!r} {[secret]}"


def test_a_kept_secret_comes_from_the_owner() -> None:
    """ "secret:NAME" is what the owner gave this process, and what it gave last."""
    secrets.take(Provision({"secret:some": "first-one"}))
    before = secrets.version()
    assert resolve("secret:some").reveal() == "first-one"
    secrets.take(Provision({"secret:some": "second-one"}, ["10.0.0.0/8", "gpu-box"]))
    assert secrets.version() != before
    assert resolve("secret:some").reveal() == "second-one"
    assert secrets.private().names == {"gpu-box"} and len(secrets.private().networks) == 1
    secrets.take(Provision())


@pytest.mark.parametrize(
    ("name", "way"),
    [("some", "batchmill secrets set some"), ("connector/c1/key", "give the connector its credential again")],
)
def test_a_missing_secret_names_the_way_out(name: str, way: str) -> None:
    """A secret that was not given is named, with what sets it."""
    with pytest.raises(ModelFailed, match=way) as caught:
        resolve(f"secret:{name}")
    assert caught.value.code == "missing_secret" and repr(name) in caught.value.message
