"""Environments of deployed functions: made once, shared, whole or not there at all."""

import asyncio
import ensurepip
import hashlib
import os
import select
import sys
from pathlib import Path

import pytest
from fakes.packages import add_wheel, use_as_index
from fakes.terms import SetTerm

from batchmill.errors import DatabaseUnavailable, InvalidInput, ModelFailed, TermOver
from batchmill.models import environments, pip_settings
from batchmill.models.environments import RECORD, Environments, check_requirements, find_python, folder_of
from batchmill.models.installers import packages_of
from batchmill.owned_files import OwnedFiles

LOCKED_FOR = f"# Python {sys.version_info.major}.{sys.version_info.minor}"
ANSWER = "import batchmill_answer_of_test as answer; print(answer.VALUE)"


@pytest.fixture
def index(tmp_path, monkeypatch):
    folder = tmp_path / "packages"
    folder.mkdir()
    add_wheel(folder, "1.0")
    use_as_index(folder, monkeypatch)
    return folder


@pytest.fixture(params=["uv", "pip"])
def installer(request, monkeypatch):
    if request.param == "pip":
        monkeypatch.setattr(pip_settings, "find_uv", lambda: None)
    else:
        assert pip_settings.find_uv() is not None, "the tests install uv"
    return request.param


async def said_by(python, text):
    process = await asyncio.create_subprocess_exec(python, "-c", text, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return out.decode().strip()


async def test_the_same_lock_is_one_environment(index, installer, tmp_path):
    """An environment has the packages of its lock, none of batchmill's, and is built once for concurrent requests."""
    made = Environments(tmp_path / "environments")
    lock = await made.lock(None, "batchmill-answer-of-test\n", tmp_path / "log")
    first, second = lock.splitlines()
    assert first == LOCKED_FOR and second.startswith("batchmill-answer-of-test==1.0 --hash=sha256:"), lock
    assert packages_of(lock) == ["batchmill-answer-of-test==1.0"]
    first, second = await asyncio.gather(*(made.python(None, lock, tmp_path / f"log{each}") for each in range(2)))
    assert first == second and len(list((tmp_path / "environments").glob("*"))) == 3
    assert await said_by(first, ANSWER) == "1.0"
    program = folder_of(Path(first).parents[1]) / "bin" / "batchmill-answer-of-test"
    assert await said_by(first, f"import subprocess; subprocess.run({str(program)!r})") == "1.0"
    assert await said_by(first, "import importlib.util as u; print(u.find_spec('msgspec'))") == "None"
    made.sweep()
    assert await said_by(first, ANSWER) == "1.0"


async def test_a_lock_is_exact(index, installer, tmp_path):
    """An unpinned requirement gets a new lock when a package is newer; the old lock still installs the old packages."""
    made = Environments(tmp_path / "environments")
    wanted = "needs-answer-of-test  # a comment\npip\n"
    add_wheel(index, own_pip := ensurepip.version(), name="pip")  # not the one that installs
    add_wheel(index, "3.0", name="needs-answer-of-test", needs=["batchmill-answer-of-test>=1"])
    old = await made.lock(None, wanted, tmp_path / "log")
    add_wheel(index, "2.0")
    new = await made.lock(None, wanted, tmp_path / "log")
    others = ["needs-answer-of-test==3.0", f"pip=={own_pip}"]
    assert packages_of(old) == ["batchmill-answer-of-test==1.0", *others]
    assert packages_of(new) == ["batchmill-answer-of-test==2.0", *others]
    values = [await said_by(await made.python(None, lock, tmp_path / "log"), ANSWER) for lock in (old, new)]
    assert values == ["1.0", "2.0"]
    pip = await made.python(None, new, tmp_path / "log")
    assert await said_by(pip, "import pip; print(pip.VALUE)") == own_pip


async def test_a_package_that_changed_is_refused(index, installer, tmp_path, monkeypatch):
    """A file with another content than at the time of the lock is not installed, and no environment remains."""
    made = Environments(tmp_path / "environments")
    lock = await made.lock(None, "batchmill-answer-of-test\n", tmp_path / "log")
    add_wheel(index, "1.0", needs=["something"])
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))  # the usual one has the file as it was
    with pytest.raises(ModelFailed, match="(?i)hash"):
        await made.python(None, lock, tmp_path / "log")
    assert list((tmp_path / "environments").iterdir()) == []


@pytest.mark.parametrize("stopped_at", [1, 2])
async def test_a_replaced_owner_leaves_what_its_successor_has_built(index, tmp_path, monkeypatch, stopped_at):
    """An installer goes on while its owner is stopped. It has a folder of its own, which a successor's build removes:
    what it writes then is no environment, whether it fails or not.
    """
    left_s, folder, run, commands = 1.0, tmp_path / "environments", environments._run, 0
    python, theirs, asked = "", set(), asyncio.Event()

    def check() -> float:
        asked.set() if left_s < 0 else None
        return left_s

    made, successor = Environments(folder, owned=OwnedFiles(SetTerm(check))), Environments(folder)
    lock = await made.lock(None, "batchmill-answer-of-test\n", tmp_path / "log")

    async def run_and_be_replaced(command, place, *args):
        nonlocal left_s, python, commands
        await run(command, place, *args)
        commands += 1
        if commands == stopped_at:
            left_s = -1.0
            with monkeypatch.context() as patch:
                patch.setattr(environments, "_run", run)
                python = await successor.python(None, lock, tmp_path / "log")
            theirs.update(folder.rglob("*"))
            place.mkdir()
            (place / "late").touch()

    monkeypatch.setattr(environments, "_run", run_and_be_replaced)
    building = asyncio.create_task(made.python(None, lock, tmp_path / "log"))
    await asyncio.wait({building, asyncio.create_task(asked.wait())}, return_when=asyncio.FIRST_COMPLETED)
    building.cancel()
    with pytest.raises((asyncio.CancelledError, ModelFailed)):
        await building
    assert set(folder.rglob("*")) == theirs and await said_by(python, ANSWER) == "1.0"
    Path(python).unlink()
    with pytest.raises(DatabaseUnavailable):  # another attempt finds out before it begins
        await made.python(None, lock, tmp_path / "log")
    assert {path.name for path in theirs} - {path.name for path in folder.rglob("*")} == {"python"}


async def test_an_environment_is_complete_only_within_the_term(index, tmp_path, monkeypatch):
    """A successor that builds the same environment anew would find the record of a folder that it is still filling."""
    is_cut_off, asked = False, asyncio.Event()

    def left_s() -> float:
        if is_cut_off:
            asked.set()
        return -1.0 if is_cut_off else 1.0

    made = Environments(tmp_path / "environments", owned=OwnedFiles(SetTerm(left_s)))
    lock = await made.lock(None, "batchmill-answer-of-test\n", tmp_path / "log")
    run = environments._run

    async def run_past_the_term(*args):
        nonlocal is_cut_off
        await run(*args)
        is_cut_off = not asked.is_set()

    monkeypatch.setattr(environments, "_run", run_past_the_term)
    building = asyncio.create_task(made.python(None, lock, tmp_path / "log"))
    await asyncio.wait({building, asyncio.create_task(asked.wait())}, return_when=asyncio.FIRST_COMPLETED)
    assert not building.done() and not list((tmp_path / "environments").glob(f"*{RECORD}"))
    is_cut_off = False  # no other process has become the owner
    assert Path(await building).exists() and len(list((tmp_path / "environments").glob(f"*{RECORD}"))) == 1


async def test_a_replaced_owner_sweeps_no_environment(tmp_path):
    """Those of versions that its successor has deployed look like what a crash has left."""
    theirs = tmp_path / "environments" / "theirs"
    theirs.mkdir(parents=True)
    with pytest.raises(TermOver):
        Environments(tmp_path / "environments", owned=OwnedFiles(SetTerm(lambda: 0.0))).sweep()
    assert theirs.exists()


async def test_requirements_with_hashes_are_a_lock(index, installer, tmp_path):
    """Requirements with hashes are taken as they are: nothing is resolved, and a missing hash is an error."""
    made = Environments(tmp_path / "environments")
    add_wheel(index, "3.0", name="needs-answer-of-test", needs=["batchmill-answer-of-test>=1"])
    digest = hashlib.sha256((index / "needs_answer_of_test-3.0-py3-none-any.whl").read_bytes()).hexdigest()
    alone = f"needs-answer-of-test==3.0 \\\n    --hash=sha256:{digest}\n"
    lock = await made.lock(None, alone, tmp_path / "log")
    assert lock == f"{LOCKED_FOR}\n--require-hashes\nneeds-answer-of-test==3.0 --hash=sha256:{digest}\n"
    with pytest.raises(ModelFailed):
        await made.python(None, lock, tmp_path / "log")


async def test_no_packages_at_all(index, installer, tmp_path):
    """An empty list is an environment without packages."""
    made = Environments(tmp_path / "environments")
    lock = await made.lock(None, "# nothing\n", tmp_path / "log")
    assert lock == f"{LOCKED_FOR}\n" and packages_of(lock) == []
    python = await made.python(None, lock, tmp_path / "log")
    assert await said_by(python, "import importlib.util as u; print(u.find_spec('msgspec'), u.find_spec('pip'))") == (
        "None None"
    )


async def test_the_installers_output_is_shown(index, installer, tmp_path):
    """Requirements that cannot be resolved are refused with the installer's own words, without credentials."""
    made = Environments(tmp_path / "environments")
    log = tmp_path / "log"
    wanted = "--find-links https://me:hunter2@127.0.0.1:9/\nbatchmill-nowhere-of-test==1\n"
    with pytest.raises(ModelFailed, match="cannot be resolved(.|\n)*batchmill-nowhere-of-test|127.0.0.1") as caught:
        await made.lock(None, wanted, log)
    assert "hunter2" not in caught.value.message
    assert list((tmp_path / "environments").iterdir()) == []
    assert log.read_bytes()


def settings_of(environ, *options):
    return pip_settings.for_uv(list(options), {"PIP_CONFIG_FILE": os.devnull, **environ})


def test_settings_of_pip_are_uvs_settings(tmp_path):
    """uv gets the indexes, certificates and time limits that pip is set up for, below its own variables."""
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://a/simple\nextra_index_url = https://b/simple\n  https://c/simple\n"
    )
    own_only = {"PIP_CONFIG_FILE": str(config), "XDG_CONFIG_DIRS": str(tmp_path)}  # this machine's pip has settings too
    found = pip_settings.for_uv([], own_only | {"PIP_CERT": "/ca.pem", "PIP_TIMEOUT": "7"}).environ
    assert found["UV_DEFAULT_INDEX"] == "https://a/simple" and found["UV_INDEX"] == "https://b/simple https://c/simple"
    assert found["SSL_CERT_FILE"] == "/ca.pem" and found["UV_HTTP_TIMEOUT"] == "7"
    assert not [name for name in found if name.startswith("PIP_")]
    own = settings_of({"PIP_INDEX_URL": "https://a/simple", "UV_INDEX_URL": "https://mine/simple"}).environ
    assert "UV_DEFAULT_INDEX" not in own and own["UV_INDEX_URL"] == "https://mine/simple"
    line = settings_of(
        {"UV_INDEX_URL": "https://mine/simple", "TOKEN": "t"}, "-i https://u:${TOKEN}@line/simple"
    ).environ
    assert line["UV_DEFAULT_INDEX"] == "https://u:t@line/simple" and "UV_INDEX_URL" not in line
    more = settings_of({"PIP_FIND_LINKS": "/one /two"}, "--find-links=/three", "--pre", "--no-index")
    assert more.environ["UV_FIND_LINKS"] == "/one,/two,/three"
    assert more.flags == ["--prerelease=allow", "--no-index"]


def test_pip_is_used_where_uv_has_no_equal(tmp_path):
    """A setting of pip that uv does not have, or a file that only pip can complain about, leaves uv aside."""
    assert settings_of({"PIP_CONSTRAINT": "c.txt"}) is None
    assert settings_of({}, "--use-pep517") is None
    (tmp_path / "pip.conf").write_text("no section\n")
    assert pip_settings.for_uv([], {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}) is None
    with pytest.raises(InvalidInput, match="No closing quotation"):
        settings_of({}, "--index-url 'https://a")


@pytest.mark.parametrize("method", ["lock", "python"])
async def test_a_build_that_is_cancelled_leaves_nothing(index, tmp_path, monkeypatch, method):
    """A cancelled resolution or build leaves no files."""
    began = asyncio.Event()

    async def hang(*_):
        began.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(environments, "_run", hang)
    made = Environments(tmp_path / "environments")
    task = asyncio.create_task(getattr(made, method)(None, "x==1", tmp_path / "log"))
    await began.wait()
    task.cancel()
    await asyncio.wait([task])
    assert list((tmp_path / "environments").iterdir()) == []


def test_what_was_left_half_made_goes(tmp_path):
    """A sweep removes environments that have no record, or that no version uses and none wanted for long."""
    for name in ("whole", "half", "old", "old_and_used", "not_linked"):
        (tmp_path / f"{name}-1").mkdir()
        (tmp_path / f"{name}-1" / "file").touch()
    for name in ("whole", "old", "old_and_used", "without_folder", "not_linked"):
        (tmp_path / f"{name}-1{RECORD}").touch()
    for name in ("whole", "half", "old", "old_and_used", "without_folder", "whole.0.part"):
        (tmp_path / name).symlink_to(f"{name.partition('.')[0]}-1")
    for name in ("old", "old_and_used"):
        os.utime(tmp_path / f"{name}-1{RECORD}", (0, 0))
    Environments(tmp_path).sweep({str(tmp_path / "old_and_used" / "bin" / "python")})
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {f"{name}{ending}" for name in ("old_and_used", "whole") for ending in ("", "-1", f"-1{RECORD}")}


async def test_a_package_cannot_complete_an_environment(index, installer, tmp_path, monkeypatch):
    """An environment whose owner died while packages were unpacked is built again, whatever files they brought."""
    made = Environments(tmp_path / "environments")
    lock = await made.lock(None, "batchmill-answer-of-test\n", tmp_path / "log")
    python = await made.python(None, lock, tmp_path / "log")
    venv = tmp_path / "environments" / python.split("/")[-3]
    record = folder_of(venv).with_name(folder_of(venv).name + RECORD)
    (venv / "batchmill-complete").write_bytes(record.read_bytes())
    record.unlink()
    (venv / "lib").rename(venv / "broken")
    assert await made.python(None, lock, tmp_path / "log") == python
    assert await said_by(python, ANSWER) == "1.0" and not (venv / "broken").exists()


async def test_a_lock_is_for_one_python(tmp_path):
    """A lock of another Python may lack packages of this one: it is refused with the way out."""
    made = Environments(tmp_path / "environments")
    with pytest.raises(
        ModelFailed, match="locked for Python 3.4, and the interpreter is Python 3.* deploy the function again"
    ):
        await made.python(None, "# Python 3.4\nx==1\n", tmp_path / "log")


async def test_a_build_leaves_no_process(tmp_path):
    """What a build has started and left behind ends with it."""
    log, left = tmp_path / "log", tmp_path / "left"
    command = ["/bin/sh", "-c", f"sleep 600 & echo $! > {left}"]
    await environments._run(command, tmp_path, log, os.environ, 60, "failed")
    watch = os.pidfd_open(int(left.read_text()))
    await asyncio.to_thread(select.select, [watch], [], [])
    os.close(watch)


async def test_packages_are_built_without_our_keys(index, tmp_path, monkeypatch):
    """What runs while packages are installed sees pip's own settings, and none of the server's variables."""
    monkeypatch.setenv("CANARY_API_KEY", "sk-canary")
    seen = pip_settings.environ_of(os.environ)
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
    """An interpreter is a path or a version; what is not a Python is refused before anything is made with it."""
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


@pytest.mark.parametrize(
    "text",
    [
        *("-r more.txt", "a==1\n--constraint c.txt", "-e .", "./local", "/abs/x.whl", "file:x", "--pre -r /etc/passwd"),
        *("a==1\r-r /etc/passwd", "a==1\u2028-r /etc/passwd", "x @ file:///p", "dir/x.whl", "~/x.whl", "x.whl", "-rx"),
        *("git+file:///repository", "a \\\n @ file:///p"),
    ],
)
def test_requirements_refer_to_nothing_else(text):
    """A line that refers to a file is refused: only the text is kept."""
    with pytest.raises(InvalidInput, match="refers to another file"):
        check_requirements(text)
    check_requirements("a==1\n# -r not\nb @ https://host/b.whl\nhttps://host/c.whl\n--pre\n-i https://host/simple\n")
    check_requirements(
        'a==1; sys_platform == "linux" --hash=sha256:ab/c\nd @ git+https://host/d.git@v1#subdirectory=e/f\n'
    )


@pytest.mark.parametrize("option", ["--requirem x", "--edit x", "--target /x", "--config-settings x"])
def test_unknown_options_of_requirements(option):
    """An option that requirements cannot have is refused by name; pip takes beginnings of names."""
    with pytest.raises(InvalidInput, match=f"the option {option.split()[0]}; they may have"):
        check_requirements(option)
