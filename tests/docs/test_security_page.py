"""The page about security: its table of scopes is that of the operations, and its proxies pass on what they should."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from dialects.open_server import CONFIG, open_server

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
_ROW = re.compile(r"^\| `?([a-z ]+)`? \| [^|]+ \| (`[^|]+`) \|$", re.MULTILINE)
HOST = "batchmill.example.com"
NAMED = {"sni_hostname": HOST}
DAY = timedelta(days=1)
START_S = 20.0
LINES = 1_000_000  # of three bytes: more than a proxy takes unless it is told
HALTING = """
import asyncio
from pathlib import Path


async def halting(model=None, stream=True):
    yield {"part": "first"}
    while not (Path(__file__).parent / "go on").exists():
        await asyncio.sleep(0.01)
    yield {"part": "second"}
"""
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
OPEN = {"no key": "", "a signed link": ""}  # what the page calls operations without a scope


def patterns_by_scope() -> dict[str, set[str]]:
    """What the page's table says of each scope; empty: no key is needed."""
    table = PAGE.partition("<!-- scopes -->")[2].partition("\n\n")[0]
    fields: dict[str, set[str]] = {}
    for scope, operations in _ROW.findall(table):
        fields.setdefault(OPEN.get(scope, scope), set()).update(re.findall(r"`([^`]+)`", operations))
    return fields


def covers(pattern: str, operation: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), operation) is not None


async def test_the_table_of_scopes_is_that_of_the_operations(tmp_path: Path) -> None:
    """Each operation of a server stands on the page once, with the scope that it asks for, and nothing else does."""
    async with open_server(tmp_path) as server, httpx2.AsyncClient() as client:
        paths = (await client.get(f"{server.url}/openapi.json")).json()["paths"]
    scopes = {
        f"{method.upper()} {path}": case.get("x-batchmill-scope", "")
        for path, methods in paths.items()
        for method, case in methods.items()
    }
    table = patterns_by_scope()
    for operation, scope in scopes.items():
        claimed = {named for named, patterns in table.items() if any(covers(each, operation) for each in patterns)}
        assert claimed == {scope}, f"docs/security.md says {claimed or 'nothing'} of {operation}: it needs {scope!r}"
    for pattern in {each for patterns in table.values() for each in patterns}:
        assert any(covers(pattern, operation) for operation in scopes), f"no operation is {pattern}"


def test_every_setting_of_the_page_is_one():
    """Each key of the configuration that the page names stands on the page about the configuration."""
    known = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    tables = "server|machine|limits|projects|models|deployments|ml_commons|secrets|functions|quotas|quarantine"
    named = set(re.findall(rf"`((?:{tables})\.[\w.]+)`", PAGE))
    assert named and not {each for each in named if f"`{each}`" not in known}


# -- proxies ----------------------------------------------------------------------------------------------------------


def shown(proxy: str) -> str:
    """The configuration of a proxy that the page shows."""
    return PAGE.partition(f"<!-- proxy: {proxy} -->\n")[2].partition("\n")[2].partition("```")[0]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of the page's host that it has signed itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOST)])
    now = datetime.now(UTC)
    built = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + DAY)
    built = built.add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
    paths = folder / "proxy.pem", folder / "proxy.key"
    paths[0].write_bytes(built.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )  # fmt: skip
    return paths


def nginx(folder: Path, upstream: str, port: int) -> list[str]:
    """The command that runs the page's nginx, its addresses replaced; both of its servers."""
    cert, key = certificate(folder)
    text = shown("nginx") + shown("nginx-grpc").replace("8443", str(free_port()))
    for case, used in (
        ("443", str(port)), ("127.0.0.1:8000", upstream), ("/etc/ssl/batchmill.pem", str(cert)),
        ("/etc/ssl/batchmill.key", str(key)),
    ):  # fmt: skip
        assert case in text
        text = text.replace(case, used)
    text = text.replace("listen ", "listen 127.0.0.1:")
    around = f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\nhttp {{ access_log off;\n"
    paths = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in TEMPORARY)
    (folder / "nginx.conf").write_text(around + paths + text + "}\n")
    return ["nginx", "-p", str(folder), "-e", f"{folder}/error.log", "-c", str(folder / "nginx.conf")]


def caddy(folder: Path, upstream: str, port: int) -> list[str]:
    """The command that runs the page's Caddy, with a certificate that nobody has to fetch."""
    cert, key = certificate(folder)
    text = shown("caddy").replace("127.0.0.1:8000", upstream)
    text = text.replace(f"{HOST} {{", f"{HOST}:{port} {{\n    bind 127.0.0.1\n    tls {cert} {key}", 1)
    (folder / "Caddyfile").write_text("{\n    admin off\n    auto_https disable_redirects\n}\n" + text)
    return ["caddy", "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]


@contextlib.asynccontextmanager
async def running(command: list[str], folder: Path, port: int) -> AsyncIterator[None]:
    """The proxy, once it takes connections."""
    log = (folder / "log").open("wb")
    environment = {**os.environ, "HOME": str(folder)}
    process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=environment)
    try:
        async with asyncio.timeout(START_S):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                assert process.returncode is None, (folder / "log").read_text()
                await asyncio.sleep(0.02)
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        log.close()


@pytest.mark.parametrize("proxy", [nginx, caddy], ids=["nginx", "caddy"])
async def test_a_proxy_of_the_page_passes_on_what_it_should(proxy, tmp_path: Path) -> None:
    """Over TLS calls are answered, streams come piece by piece, and uploads of any size arrive."""
    if shutil.which(proxy.__name__) is None:
        pytest.skip(f"{proxy.__name__} is not installed here")
    port = free_port()
    (tmp_path / "halting.py").write_text(HALTING)
    config = CONFIG + f'\n[server]\nallowed_hosts = ["{HOST}"]\n[models.halting]\nengine = "function"\n'
    config += 'source = "halting.py:halting"\n'
    async with open_server(tmp_path, config) as server:
        upstream = server.url.removeprefix("http://")
        command = proxy(tmp_path, upstream, port)
        trusts = ssl.create_default_context(cafile=str(tmp_path / "proxy.pem"))
        async with (
            running(command, tmp_path, port),
            httpx2.AsyncClient(
                base_url=f"https://127.0.0.1:{port}", verify=trusts, headers={"host": HOST}, timeout=START_S
            ) as client,
        ):
            health = await client.get("/health", extensions=NAMED)
            assert health.json()["status"] == "ok"
            answer = await client.post("/v1/double", json={"model": "double", "n": 21}, extensions=NAMED)
            assert answer.json()["twice"] == 42
            binary = {"content-type": "application/octet-stream"}
            upload = await client.post(
                "/batchmill/v1/files?filename=a.jsonl", content=b"{}\n" * LINES, headers=binary, extensions=NAMED
            )
            assert upload.json()["bytes"] == 3 * LINES, upload.text
            body = {"model": "halting", "stream": True}
            async with client.stream("POST", "/v1/halting", json=body, extensions=NAMED) as reply:
                pieces = reply.aiter_text()
                assert "first" in await anext(pieces)  # while the function waits for what follows
                (tmp_path / "go on").touch()
                assert "second" in "".join([piece async for piece in pieces])
