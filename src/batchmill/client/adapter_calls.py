"""Adapters over the SDK: registered or uploaded, waited for, looked at, removed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import BinaryIO

from batchmill.client.calls import ask as call_of
from batchmill.client.messages import Ask, Broken, Reply, SendFile, Sleep, Steps
from batchmill.client.procedures import ask, unreachable
from batchmill.client.replies import value_of
from batchmill.errors import InvalidInput, ModelFailed
from batchmill.wire import adapter_bundles
from batchmill.wire import operations as table
from batchmill.wire.adapter_bundles import ADAPTER_MEDIA
from batchmill.wire.native_adapters import AdapterInfo, AdapterList, NewAdapter

FETCHING, FAILED = "fetching", "failed"
LOOK_S, LOOK_S_MAX = 0.2, 5.0  # between two looks at an adapter that is being fetched
SPOOL_BYTES = 16 * 1024 * 1024  # of an archive that is kept in memory


def register(adapter: NewAdapter) -> Ask[AdapterInfo]:
    """Each makes another version: it is not asked twice."""
    return call_of(table.REGISTER_ADAPTER, body=adapter)


def upload(name: str, base: str, size_bytes: int) -> Ask[AdapterInfo]:
    """The archive is the body."""
    headers = {"content-type": ADAPTER_MEDIA, "content-length": str(size_bytes)}
    return call_of(table.UPLOAD_ADAPTER, name, headers=headers, base=base)


def adapters(base: str | None) -> Ask[AdapterList]:
    return call_of(table.LIST_ADAPTERS, base=base)


def adapter(name: str, version: int | None) -> Ask[AdapterInfo]:
    return call_of(table.SHOW_ADAPTER, name, version=version)


def remove_adapter(name: str, version: int | None) -> Ask[AdapterList]:
    return call_of(table.REMOVE_ADAPTER, name, version=version)


def add(name: str, source: str | os.PathLike[str], *, base: str, token: str | None) -> Steps[AdapterInfo]:
    """Register an adapter and wait until it is ready: a folder of this machine is sent, anything else is fetched.

    Raises: InvalidInput, also where there is no such folder; ModelFailed (`adapter_failed`) where it cannot be had or
    does not fit; what the server refuses.
    """
    text = os.fspath(source)
    is_folder = os.path.isdir(text)
    if is_folder and token is not None:
        raise InvalidInput("a folder of this machine needs no token: leave it out", code="needless_token")
    if not is_folder and (not isinstance(source, str) or text.startswith((".", "~"))):
        raise InvalidInput(f"there is no folder {text!r}", code="unknown_adapter")
    if is_folder:
        info = yield from _send(name, base, Path(text))
    else:
        info = yield from ask(register(NewAdapter(name, base, text, token)))
    wait_s = LOOK_S
    while info.state == FETCHING:
        yield Sleep(wait_s)
        wait_s = min(2 * wait_s, LOOK_S_MAX)
        info = yield from ask(adapter(name, info.version))
    if info.state == FAILED:
        raise ModelFailed(f"the adapter {info.own_name} cannot be used: {info.message}", code="adapter_failed")
    return info


def _send(name: str, base: str, folder: Path) -> Steps[AdapterInfo]:
    with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as file:
        adapter_bundles.write(file, folder)  # type: ignore[arg-type]
        size_bytes = file.tell()
        file.seek(0)
        return (yield from _send_file(name, base, file, size_bytes))  # type: ignore[arg-type]


def _send_file(name: str, base: str, file: BinaryIO, size_bytes: int) -> Steps[AdapterInfo]:
    what = upload(name, base, size_bytes)
    try:
        reply: Reply = yield SendFile(what.request, file)
    except Broken as broken:
        raise unreachable(broken) from None
    return value_of(what, reply)
