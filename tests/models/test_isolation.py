"""Isolated functions: what they see of the machine, how they end, and where isolation is refused."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from batchmill.errors import InvalidConfig, ModelFailed
from batchmill.function_runtime import frames
from batchmill.models.environments import Environments, base_of, folder_of
from batchmill.models.function_child import FunctionChild
from batchmill.models.function_socket import Frame
from batchmill.models.isolation import function_prefix, isolation_of_config, require
from batchmill.types import FunctionSpec, Isolation, Limits, ModelSpec
from batchmill.types.isolation import FunctionsEntry

PATIENCE_S = 60.0
CANARY = "canary-of-another-process"
# A program that tries one thing after another: name -> what came of it, or the class of the error.
PROBES = """
import ctypes, os, signal, socket

def f(tries: dict):
    def connect(family, address):
        with socket.socket(family) as found:
            found.settimeout(5)
            found.connect(address)
        return "connected"

    def unshare():
        if ctypes.CDLL(None, use_errno=True).unshare(0x10000000) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        return "a namespace"

    def environs():
        return [open(f"/proc/{pid}/environ").read() for pid in os.listdir("/proc") if pid.isdigit()]

    found = {}
    for name, text in tries.items():
        try:
            found[name] = str(eval(text, {**globals(), **locals()}))
        except BaseException as error:
            found[name] = type(error).__name__
    return found
"""
MARKER = "import time\n\ndef f(a):\n    held = bytearray(300_000_000)\n    time.sleep(600)\n"

PLAIN = {"from_job": False, "staged": False, "exact": False}


class Place:
    """A data directory with what is nobody's business, and a version in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data, self.home = folder, folder / "data", folder / "data" / "workers" / "w"
        self.code = self.data / "models" / "versions" / "f" / "main" / "1" / "code"
        for each in (self.home, self.code, self.data / "environments" / "other", self.code.parents[2] / "main" / "2"):
            each.mkdir(parents=True)
        (self.data / "secrets.key").write_text(CANARY)
        (self.data / "environments" / "other" / "keys").write_text(CANARY)

    def child(self, text: str, isolation: Isolation, **how: Any) -> FunctionChild:
        (self.code / "app.py").write_text(text)
        function = FunctionSpec(version="main/1", folder=str(self.code), digest="0")
        spec = ModelSpec("f", "function_process", "app.py:f", function=function, **how)
        return FunctionChild(spec, self.home, isolation=isolation)

    def isolation(self, *, network: bool = False) -> Isolation:
        entry = FunctionsEntry(isolate="bubblewrap", network=network)
        found = isolation_of_config(entry, self.data)
        assert found is not None
        return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def call(child: FunctionChild, argument: object) -> object:
    come: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
    child.on_frames = lambda frames: come.set_result(frames[0])
    ask = {"kind": "ask", "id": 7, "rows": 1, "layout": "positional", **PLAIN}
    child.send(ask, [json.dumps([[argument]]).encode()])
    async with asyncio.timeout(PATIENCE_S):
        meta, buffers = await come
    assert (meta["id"], meta["errors"]) == (7, {})
    return json.loads(bytes(buffers[0]))[0]


async def tried(child: FunctionChild, tries: dict[str, str]) -> dict[str, str]:
    try:
        await child.start(PATIENCE_S)
        found = await call(child, tries)
    finally:
        await child.stop()
    assert isinstance(found, dict)
    return found


async def test_code_sees_itself_and_the_system(place: Place) -> None:
    """Isolated code reads neither the data directory, nor another version or environment, nor any home; it sees no
    other process, connects to nothing of the machine's, makes no namespace, and writes nowhere but in its own /tmp."""
    data, pid = place.data, os.getpid()
    with socket.socket(socket.AF_UNIX) as control, socket.socket(socket.AF_UNIX) as named, socket.socket() as http:
        control.bind(str(data / "control.sock"))
        named.bind("\0batchmill-test-of-isolation")
        http.bind(("127.0.0.1", 0))
        for each in (control, named, http):
            each.listen()
        closed = {
            "key": f"open({str(data / 'secrets.key')!r}).read()",
            "database": f"open({str(data / 'batchmill.db')!r}, 'rb')",
            "environment": f"os.listdir({str(data / 'environments')!r})",
            "version": f"os.listdir({str(place.code.parents[2] / 'main' / '2')!r})",
            "control": f"connect(socket.AF_UNIX, {str(data / 'control.sock')!r})",
            "abstract": "connect(socket.AF_UNIX, '\\0batchmill-test-of-isolation')",
            "loopback": f"connect(socket.AF_INET, ('127.0.0.1', {http.getsockname()[1]}))",
            "root": f"os.listdir('/proc/{pid}/root')",
            "kill": f"os.kill({pid}, 0)",
            "namespace": "unshare()",
            "shadow": "open('/etc/shadow').read()",
            "private": "os.listdir('/etc/ssl/private')",
            "code": f"open({str(place.code / 'app.py')!r}, 'a')",
            "system": "open('/usr/x', 'w')",
            "top": "open('/x', 'w')",
            "device": "open('/dev/x', 'w')",
            "mount": "ctypes.CDLL(None).umount2(b'/tmp', 2) == 0 or 1 / 0",
        }
        open_ = {
            "data": f"sorted(os.listdir({str(data)!r}))",
            "home": "os.listdir(os.path.expanduser('~')) == os.listdir('/tmp')",
            "tmp": "open('/tmp/x', 'w').write('x')",
            "shm": "open('/dev/shm/x', 'w').write('x')",
            "environs": f"any({CANARY!r} in each for each in environs())",
            "processes": "sum(each.isdigit() for each in os.listdir('/proc'))",
            "setuid": "[line.split()[1] for line in open('/proc/self/status') if line.startswith('NoNewPrivs')]",
            "rights": "[line.split()[1] for line in open('/proc/self/status') if line.startswith('CapEff')]",
        }
        found = await tried(place.child(PROBES, place.isolation()), closed | open_)
    errors = {"FileNotFoundError", "ProcessLookupError", "ConnectionRefusedError", "OSError", "PermissionError"}
    assert {name: found[name] for name in closed if found[name] not in errors | {"ZeroDivisionError"}} == {}
    assert {name: found[name] for name in open_} == {
        "data": "['models']", "home": "True", "tmp": "1", "shm": "1", "environs": "False", "processes": "2",
        "setuid": "['1']", "rights": "['0000000000000000']",
    }  # fmt: skip


async def test_the_network_is_as_configured(place: Place) -> None:
    """With the network, isolated code reaches what the machine does; files stay closed to it all the same."""
    with socket.socket() as http:
        http.bind(("127.0.0.1", 0))
        http.listen()
        tries = {
            "loopback": f"connect(socket.AF_INET, ('127.0.0.1', {http.getsockname()[1]}))",
            "key": f"open({str(place.data / 'secrets.key')!r}).read()",
        }
        found = await tried(place.child(PROBES, place.isolation(network=True)), tries)
    assert found == {"loopback": "connected", "key": "FileNotFoundError"}


async def test_how_it_ends_is_told_as_ever(place: Place) -> None:
    """What an isolated process holds is measured, what it was calling is known, and which signal ended it is told."""
    child = place.child(MARKER, place.isolation(), limits=Limits(memory_bytes=10**9))
    await child.start(PATIENCE_S)
    ended = asyncio.Event()
    child.ended = ended.set
    ask = {"kind": "ask", "id": 7, "rows": 1, "layout": "positional", **PLAIN}
    child.write(frames.pack(ask, [b"[[1]]"]))
    async with asyncio.timeout(PATIENCE_S):
        while child.resident_bytes() < 300_000_000:
            await asyncio.sleep(0.01)
        inside = child._bubblewrap.pid()
        assert child.blamed() == [(7, 0, 1)] and inside not in (0, child.pid)
        os.kill(inside, 11)
        await ended.wait()
    assert child.ending() == "signal SIGSEGV"
    await child.stop()


async def test_packages_are_installed_in_isolation(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages are installed with nothing of the data directory there but their environment; what one of them leaves
    under the name of our mark does not count, and the function has the package and no other environment."""
    index = place.folder / "packages"
    index.mkdir()
    name = "batchmill_answer_of_test-1.0"
    with zipfile.ZipFile(index / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("batchmill_answer_of_test.py", "VALUE = 42\n")
        wheel.writestr(f"{name}.data/data/record.json", '{"python": "/usr/bin/python3", "places": ["/"]}')
        wheel.writestr(
            f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: batchmill-answer-of-test\nVersion: 1.0\n"
        )
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    isolation = require(Isolation("", False, str(place.data), [str(index)]))
    made = Environments(place.data / "environments", isolation)
    python = await made.python(None, "batchmill-answer-of-test==1.0\n", place.folder / "log")
    assert python is not None
    home = Path(python).parents[1]
    assert base_of(home).python == sys.executable and "/" not in base_of(home).places
    tries = {
        "has": "__import__('batchmill_answer_of_test').VALUE",
        "there": f"sorted(os.listdir({str(home.parent)!r})) == {[home.name, folder_of(home).name]!r}",
    }
    found = await tried(place.child(PROBES, isolation, python=python), tries)
    assert found == {"has": "42", "there": "True"}


def test_it_is_refused_where_it_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Isolation that is asked for is had or refused: where the program is missing, where it makes no namespaces, and
    where it would show functions the data directory."""
    request = FunctionsEntry(isolate="bubblewrap")
    assert isolation_of_config(FunctionsEntry(), tmp_path) is None
    for shown in (str(tmp_path), str(tmp_path.parent), str(tmp_path / "nowhere")):
        with pytest.raises(InvalidConfig, match="functions.readable"):
            isolation_of_config(FunctionsEntry(isolate="bubblewrap", readable=[shown]), tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidConfig, match="no bwrap on the PATH: install the package bubblewrap"):
        isolation_of_config(request, tmp_path)
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho no permission to make a namespace >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    with pytest.raises(InvalidConfig, match="cannot create namespaces here: no permission to make a namespace"):
        isolation_of_config(request, tmp_path)


def test_a_home_is_shown_to_no_function(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter whose folder holds the home of the server's user is refused."""
    monkeypatch.setenv("HOME", str(place.folder / "lib"))
    with pytest.raises(ModelFailed, match="contains more than"):
        function_prefix(place.isolation(), "/usr/bin/python3", [str(place.folder)], folder="/usr", gpus=0)
