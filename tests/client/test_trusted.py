"""Which certificates a client reads."""

from __future__ import annotations

import os
import ssl

import pytest

from batchmill.client.connection import trusted


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def test_plain_http_reads_no_certificates() -> None:
    """Nothing is trusted then, should TLS be spoken nevertheless."""
    for url in ("http://127.0.0.1:8000", "HTTP://server"):
        context = trusted(url)
        assert isinstance(context, ssl.SSLContext) and context.get_ca_certs() == []
        assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname


@pytest.mark.parametrize(
    ("url", "proxy"),
    [("https://server", ""), ("http://server", "https://proxy:3128"), ("http://server", "HTTPS://proxy:3128")],
)
def test_where_tls_is_spoken_the_system_is_trusted(url: str, proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the server, or to a proxy."""
    if proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy)
    assert trusted(url) is True
