"""Secrets taken out of text, in every form in which one travels."""

from __future__ import annotations

import base64
import io
import json
import logging
from urllib.parse import quote, quote_plus

import pytest

from batchmill.models import redaction, secrets
from batchmill.models.secrets import resolve
from batchmill.types import Provision

CANARY = 'Cana/ry+4711="q" \\and-more'
OTHER = "another-canary-0815"
LONG = "another-canary-0815-that-is-longer"


@pytest.fixture(autouse=True)
def learnt() -> None:
    for each in (CANARY, OTHER, LONG):
        redaction.learn(each)


@pytest.mark.parametrize(
    "form",
    [
        CANARY, quote(CANARY), quote(CANARY, safe=""), quote_plus(CANARY), json.dumps(CANARY), repr(CANARY),
        base64.b64encode(CANARY.encode()).decode(), base64.urlsafe_b64encode(CANARY.encode()).decode(),
        CANARY.encode().hex(),
    ],
)  # fmt: skip
def test_a_secret_is_found_in_any_form(form: str) -> None:
    """A secret that was learnt is taken out as it is, and as URLs, JSON, Python and base64 write it."""
    text = redaction.mask(f"it was {form}, they said")
    assert text.startswith("it was ") and text.endswith(", they said") and "***" in text
    assert form.strip("\"'") not in text and "4711" not in text


@pytest.mark.parametrize("user", ["", "a", "ab", "abc", "somebody@example.com"])
@pytest.mark.parametrize("secret", [OTHER, CANARY, "12345678"])
def test_a_secret_within_basic_credentials(user: str, secret: str) -> None:
    """Wherever a secret begins within what base64 packs, little of it is left."""
    redaction.learn(secret)
    for before, after in ((f"{user}:", ""), (f"{user}:", ":realm")):
        for pack in (base64.b64encode, base64.urlsafe_b64encode):
            packed = pack(f"{before}{secret}{after}".encode()).decode()
            result = redaction.mask_known(f"x {packed} y")
            assert "***" in result
            left = result.removeprefix("x ").removesuffix(" y").split("***")
            assert all(base64.urlsafe_b64decode(part[: len(part) // 4 * 4].replace("+", "-").replace("/", "_"))
                       .decode(errors="replace").count(secret[2:-2]) == 0 for part in left)  # fmt: skip


def test_the_longest_goes_first() -> None:
    """A secret that begins with another is taken out whole."""
    assert redaction.mask_known(f"<{LONG}> <{OTHER}>") == "<***> <***>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("key sk-proj-abcdefgh1234 there", "key *** there"),
        ("Authorization: Bearer abc.def/ghi", "Authorization: Bearer ***"),
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", "Authorization: Basic ***"),
        ("id AKIAIOSFODNN7EXAMPLE.", "id ***."),
        ("token eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSM", "token ***"),
        ("https://h/p?X-Amz-Signature=0123abcd&x=1", "https://h/p?X-Amz-Signature=***&x=1"),
        ("https://h/p?key=AIzaSyA-1&alt=sse", "https://h/p?key=***&alt=sse"),
        ("https://h/p?a=1&api_key=xyz", "https://h/p?a=1&api_key=***"),
        ("signed with whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "signed with ***"),
    ],
)
def test_what_looks_like_a_key_is_taken_out(text: str, expected: str) -> None:
    """What looks like a key is none of a reader's business, whoever's it is."""
    assert redaction.mask(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "the key-value-database of sk-learn", "row 17: a primary key is missing", "the bearer of this letter",
        "pk_1 = 7", "http://127.0.0.1:8000/v1/models?monkey=1", "Basic training", "Bearer token required",
    ],
)  # fmt: skip
def test_words_are_left_alone(text: str) -> None:
    """Ordinary words stay as they are."""
    assert redaction.mask(text) == text


def test_short_secrets_are_not_looked_for() -> None:
    """What is shorter than eight characters is likely to be part of something else."""
    redaction.learn("1234567")
    assert redaction.mask("1234567") == "1234567"
    redaction.learn("zz345678")
    assert redaction.mask("zz345678") == "***"


def test_lines_are_the_same_list_when_nothing_is_in_them() -> None:
    """Lines without secrets are handed back untouched; of others the secret alone is missing."""
    lines = [b'{"a":1}', b'{"b":2}']
    assert redaction.mask_lines(lines) is lines
    assert redaction.mask_lines([lines[0], f'{{"b":"{OTHER}"}}'.encode()]) == [lines[0], b'{"b":"***"}']


def test_logs_show_no_secret() -> None:
    """A handler that is guarded writes neither a secret in a message nor one in a traceback."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.addFilter(redaction.LogFilter())
    log = logging.Logger("test")
    log.addHandler(handler)
    log.warning("called with %s and %r", OTHER, CANARY)
    try:
        raise ValueError(f"no such key: {CANARY}")
    except ValueError:
        log.exception("it failed for %d", 3)
    assert "called with *** and" in out.getvalue() and "it failed for 3" in out.getvalue()
    assert "ValueError: no such key: ***" in out.getvalue()
    assert OTHER not in out.getvalue() and "4711" not in out.getvalue()


def test_printed_tracebacks_show_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor does a traceback that a worker leaves in its log."""
    try:
        raise ValueError(OTHER)
    except ValueError as error:
        redaction.print_exception(error)
    assert capsys.readouterr().err.endswith("ValueError: ***\n")


def test_no_more_than_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many secrets those that were read longest ago are forgotten; one that is read again counts as new."""
    monkeypatch.setattr(redaction, "LEARNT_MAX", 3)
    known = redaction._LearntSecrets()
    for name in ("secret-one", "secret-two", "secret-three", "secret-one", "secret-four"):
        known.learn(name)
    kept = [name for name in ("secret-one", "secret-two", "secret-three", "secret-four") if name in known.texts]
    assert kept == ["secret-one", "secret-three", "secret-four"]


def test_a_region_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ML Commons keeps beside keys and is none stays in every text; a secret of that name is one."""
    monkeypatch.setenv("THE_REGION", "eu-canary-9")
    resolve("env:THE_REGION", key="region")
    secrets.take(
        Provision({"secret:connector/c/region": "eu-canary-9", "secret:connector/c/service_name:x1": "canaryservice"})
    )
    arn = "arn:aws:canaryservice:eu-canary-9:1:job/x"
    assert redaction.mask(arn) == redaction.mask_known(arn) == arn
    secrets.take(Provision({"secret:region": "eu-canary-9"}))
    assert redaction.mask(arn) == "arn:aws:canaryservice:***:1:job/x"


def test_one_text_without_some_secrets() -> None:
    """Secrets that are named are taken out of bytes in every form; those that are not stay."""
    text = f"{quote(LONG)} {base64.b64encode(b'a:' + LONG.encode()).decode()} and {OTHER}".encode()
    left = redaction.without(text, [LONG])
    assert LONG.encode() not in left and left.startswith(b"*** ") and left.endswith(f" and {OTHER}".encode())
