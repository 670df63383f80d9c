"""Which requests count as equal."""

from __future__ import annotations

import msgspec
import pytest

from batchmill.datasets.request_digests import NO_DIGEST, canonical_of, digest_of, digests_of

SCHEMA = b'{"type":"object","properties":{%b}}'
A, B = b'"a":{"type":"string"}', b'"b":{"type":"string"}'


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        (b'{"a":1,"b":{"c":2,"d":3}}', b'{ "b": {"d":3, "c":2}, "a":1 }', True),
        (b'{"a":1}', b'{"a":1.0}', False),
        (b'{"a":1.0}', b'{"a":1.00}', False),
        (b'{"a":"\\u0062"}', b'{"a":"b"}', True),
        (b'{"a":[1,2]}', b'{"a":[2,1]}', False),
        (b'{"s":' + SCHEMA % (A + b"," + B) + b',"t":1}', b'{"t":1,"s":' + SCHEMA % (A + b" ," + B) + b"}", True),
        (b'{"s":' + SCHEMA % (A + b"," + B) + b"}", b'{"s":' + SCHEMA % (B + b"," + A) + b"}", False),
        (b'{"a":"\\"properties\\":","b":{"c":2,"d":3}}', b'{"a":"\\"properties\\":","b":{"d":3,"c":2}}', True),
    ],
)
def test_equal_requests(one, other, is_equal):
    """Blanks and the order of fields do not count, but for the order of a schema's; digits do."""
    assert (canonical_of(one) == canonical_of(other)) == is_equal


def test_many_digests_are_those_of_single_rows():
    """Also among rows whose numbers have too many digits to be compared: those equal none."""
    long = b'{"a":%b}' % (b"1" * 5000)
    bodies = [msgspec.Raw(body) for body in (b'{"a":1}', b'{"b":[2.50], "a":{}}', SCHEMA % A)]
    for some in (bodies, [*bodies, msgspec.Raw(long)]):
        urls = ["/a", "/b", "/a", "/b"][: len(some)]
        singly = [
            digest_of(url, canonical_of(body), is_deterministic=False) for url, body in zip(urls, some, strict=True)
        ]
        assert digests_of(urls, some) == b"".join(singly)
    assert singly[-1] == NO_DIGEST
