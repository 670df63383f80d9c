"""Environments of deployed functions: made once, shared, whole or not there at all."""

import asyncio
import os
import select
import sys
import zipfile

import pytest

from batchmill.errors import InvalidInput, ModelFailed
from batchmill.models import environments
from batchmill.models.environments import MARK, Environments, check_requirements, find_python

ANSWER = "import batchmill_answer_of_test as answer; print(answer.VALUE)"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of packages in the place of an index, told to pip as a user tells it."""
    folder = tmp_path / "packages"
    folder.mkdir()
    name = "batchmill_answer_of_test-1.0"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("batchmill_answer_of_test.py", "VALUE = 42\n")
        info = f"{name}.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: batchmill-answer-of-test\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


async def said_by(python, text):
    process = await asyncio.create_subprocess_exec(python, "-c", text, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return out.decode().strip()


async def test_the_same_requirements_are_one_environment(index, tmp_path):
    """An environment has what it was told, nothing of batchmill's, and is made once, whoever asks at the same time."""
    made = Environments(tmp_path / "environments")
    wanted = "batchmill-answer-of-test==1.0\n"
    first, second = await asyncio.gather(*(made.python(None, wanted, tmp_path / f"log{each}") for each in range(2)))
    assert first == second and len(list((tmp_path / "environments").iterdir())) == 1
    assert await said_by(first, ANSWER) == "42"
    assert await said_by(first, "import importlib.util as u; print(u.find_spec('msgspec'))") == "None"
    made.sweep()
    assert await said_by(first, ANSWER) == "42"


async def test_what_pip_says_is_told_and_nothing_stays(index, tmp_path):
    """Requirements that cannot be installed are refused with pip's own words, without credentials."""
    made = Environments(tmp_path / "environments")
    log = tmp_path / "log"
    with pytest.raises(ModelFailed, match="batchmill-nowhere-of-test"):
        await made.python(None, "--find-links https://me:hunter2@127.0.0.1:9/\nbatchmill-nowhere-of-test==1\n", log)
    assert list((tmp_path / "environments").iterdir()) == []
    assert b"batchmill-nowhere-of-test" in log.read_bytes()


async def test_a_build_that_is_cancelled_leaves_nothing(index, tmp_path, monkeypatch):
    """When whoever asked for an environment goes, so does what was made of it."""
    began = asyncio.Event()

    async def hang(*_):
        began.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(environments, "_run", hang)
    made = Environments(tmp_path / "environments")
    task = asyncio.create_task(made.python(None, "x==1", tmp_path / "log"))
    await began.wait()
    task.cancel()
    await asyncio.wait([task])
    assert list((tmp_path / "environments").iterdir()) == []


def test_what_was_left_half_made_goes(tmp_path):
    """A sweep removes environments that have no mark, or that no version uses and nobody wanted for long."""
    for name in ("whole", "half", "old", "old_and_used"):
        (tmp_path / name).mkdir()
    (tmp_path / "whole" / MARK).touch()
    for name in ("old", "old_and_used"):
        (tmp_path / name / MARK).touch()
        os.utime(tmp_path / name / MARK, (0, 0))
    Environments(tmp_path).sweep({str(tmp_path / "old_and_used" / "bin" / "python")})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["old_and_used", "whole"]


async def test_packages_are_built_without_our_keys(index, tmp_path, monkeypatch):
    """What runs while packages are installed sees pip's own settings, and none of the server's variables."""
    monkeypatch.setenv("CANARY_API_KEY", "sk-canary")
    seen = environments._environ()
    assert "PIP_NO_INDEX" in seen and "PATH" in seen and "CANARY_API_KEY" not in seen


def test_a_version_is_found_behind_shims(tmp_path, monkeypatch):
    """A shim of pyenv's stands for whatever pyenv is set to: the newest interpreter of the version is taken itself."""
    for place in ("shims", "versions/3.10.2/bin", "versions/3.10.13/bin"):
        program = tmp_path / place / "python3.10"
        program.parent.mkdir(parents=True)
        program.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "shims"))
    assert find_python("3.10") == str(tmp_path / "versions/3.10.13/bin/python3.10")


async def test_interpreters_by_path_and_version(tmp_path):
    """An interpreter is a path or a version; what is no Python is refused before anything is made with it."""
    made = Environments(tmp_path / "environments")
    assert await made.python(None, None, tmp_path / "log") is None
    assert await made.python(sys.executable, None, tmp_path / "log") == sys.executable
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"python{version}" in find_python(version) or find_python(version) == sys.executable
    (tmp_path / "text").write_text("no program")
    (tmp_path / "text").chmod(0o755)
    for wrong in ("/bin/cat", str(tmp_path / "text"), str(tmp_path), "python3", "3.99"):
        with pytest.raises(InvalidInput) as caught:
            await made.python(wrong, None, tmp_path / "log")
        assert caught.value.code == "unknown_python"


async def test_what_an_interpreter_starts_keeps_nobody_waiting(tmp_path):
    """A wrapper of an interpreter that leaves a process behind, which holds its output, is asked all the same."""
    wrapper = tmp_path / "python3"
    wrapper.write_text(f'#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/left\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    assert await environments._version_of(str(wrapper)) == await environments._version_of(sys.executable)
    left = os.pidfd_open(int((tmp_path / "left").read_text()))
    await asyncio.to_thread(select.select, [left], [], [])
    os.close(left)


@pytest.mark.parametrize("text", ["-r more.txt", "a==1\n--constraint c.txt", "-e .", "./local", "/abs/x.whl", "file:x"])
def test_requirements_refer_to_nothing_else(text):
    """A line that refers to a file is refused: only the text is kept."""
    with pytest.raises(InvalidInput, match="refers to another file"):
        check_requirements(text)
    check_requirements("a==1\n# -r not\nb @ https://host/b.whl\n")
