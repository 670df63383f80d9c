"""After a loss of power, with only what was synced left on the disk, everything that was acknowledged is there."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from fakes.lora_files import write_base, write_lora
from fakes.lossy_disk.disk import COMPILER, Bytes, LossyDisk, Names
from fakes.lost_machine import run_until
from fakes.packages import add_wheel, use_as_index
from fakes.running_server import RunningServer

from batchmill.cli.session import EXIT_ROWS_FAILED
from batchmill.store import folder_objects
from batchmill.store.objects import StoreObjects

pytestmark = pytest.mark.skipif(COMPILER is None, reason="a C compiler builds the disk that loses what was not synced")
ROWS = 3000
TIMEOUT_S = 60.0
COUNTING = """
import os
def double(n):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(f"{n}\\n")
    if os.environ.get("FAILS") and n % 100 == 0:
        raise ValueError(n)
    return 2 * n
"""
CAPTURED = """
import os
import sys
import batchmill

def double(n):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(f"{n}\\n")
    return 2 * n

job = batchmill.run([{"n": n} for n in range(3000)], model=double, data_dir=sys.argv[1])
print(sum(row["output"] for row in job))
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LossyDisk]:
    """The disk of `tmp_path / "disk"`; other files of the test are safe."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        disk = LossyDisk(folder)
    except NotImplementedError as error:
        pytest.skip(str(error))
    yield disk
    disk.close()


def lines_of(rows: int) -> str:
    row = '{"custom_id":"r%d","method":"POST","url":"/v1/x","body":{"n":%d}}\n'
    return "".join(row % (n, n) for n in range(rows))


class Command:
    """`batchmill run` on the disk, with rows and results on it too."""

    def __init__(self, tmp_path: Path, disk: LossyDisk) -> None:
        self.folder, self.calls, self._fired = tmp_path / "disk", tmp_path / "calls", tmp_path / "fired"
        (self.folder / "app.py").write_text(COUNTING)
        (self.folder / "in.jsonl").write_text(lines_of(ROWS))
        disk.keep()
        self.environment = {**os.environ, **disk.environment, "CALLS": str(self.calls)}
        self.batchmill = [sys.executable, "-m", "batchmill", "--data-dir", "data"]
        self.words = [
            *self.batchmill, "run", "in.jsonl", "--model", "function:app.py:double", "-o", "out.jsonl", "--workers", "2"
        ]  # fmt: skip

    def run_until(self, point: str, words: list[str], **more: str) -> None:
        fault = {"BATCHMILL_FAULT": f"{point}:1:{self._fired}"}
        run_until(self._fired, words, self.folder, {**self.environment, **more, **fault})
        self._fired.unlink()

    def run(self, words: list[str], *, code: int = 0, **more: str) -> str:
        done = subprocess.run(
            words, cwd=self.folder, env={**self.environment, **more}, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == code, done.stderr
        return done.stdout

    def check(self) -> None:
        """All results are there, and no row was run more than twice."""
        lines = [json.loads(line) for line in (self.folder / "out.jsonl").read_text().splitlines()]
        assert [line["response"]["body"] for line in lines] == [2 * n for n in range(ROWS)]
        assert max(Counter(self.calls.read_text().split()).values()) <= 2


@pytest.fixture
def command(tmp_path: Path, disk: LossyDisk) -> Command:
    return Command(tmp_path, disk)


@pytest.mark.parametrize(
    ("point", "names", "content"),
    [
        ("after_create", "all", "synced"), ("after_lease", "all", "mixed"), ("after_commit", "synced", "mixed"),
        ("before_publish", "synced", "synced"),
    ],
)  # fmt: skip
def test_a_command(point: str, names: Names, content: Bytes, command: Command, disk: LossyDisk):
    """The same command again goes on, whatever is left of what was not synced."""
    command.run_until(point, command.words)
    disk.lose_power(random.Random(point), names, content)
    command.run(command.words)
    command.check()


def test_a_retry(command: Command, disk: LossyDisk):
    """The rows that are run again are known by a plan of their own. Results that are written once more are there."""
    command.run(command.words, code=EXIT_ROWS_FAILED, FAILS="1")
    [job] = [path.name for path in (command.folder / "data" / "jobs").glob("job_*")]
    command.run_until("after_lease", [*command.batchmill, "retry", job])
    disk.lose_power(random.Random(1), "synced", "synced")
    command.run([*command.batchmill, "resume", job])
    command.check()
    command.run([*command.batchmill, "results", job, "-o", "again.jsonl"])
    disk.lose_power(random.Random(1), "synced", "synced")
    assert len((command.folder / "again.jsonl").read_bytes().splitlines()) == ROWS


def test_rows_and_a_function_of_a_program(command: Command, disk: LossyDisk):
    """They are files of the data directory alone: the program again goes on with them."""
    (command.folder / "program.py").write_text(CAPTURED)
    disk.keep()
    words = [sys.executable, "program.py", "data"]
    command.run_until("after_commit", words)
    disk.lose_power(random.Random(1), "all", "synced")
    assert int(command.run(words)) == 2 * sum(range(ROWS))


def test_what_a_server_has_acknowledged(tmp_path: Path, disk: LossyDisk, monkeypatch: pytest.MonkeyPatch):
    """Uploads, parts of one, results of a cancelled batch, a function with packages and an adapter are there."""
    folder = tmp_path / "disk"
    write_base(folder / "tiny")
    write_lora(folder / "upper")
    (tmp_path / "wheels").mkdir()
    add_wheel(tmp_path / "wheels", "2", "factor-of-test")
    use_as_index(tmp_path / "wheels", monkeypatch)
    (tmp_path / "needs.txt").write_text("factor-of-test")
    (folder / "app.py").write_text(
        "def twice(n: int):\n    import factor_of_test\n    return int(factor_of_test.VALUE) * n\n"
    )
    (folder / "slow.py").write_text("import time\ndef wait(n):\n    time.sleep(600)\n")
    config = (
        '[models.slow]\nengine = "function"\nsource = "slow.py:wait"\n[models.tiny]\nengine = "vllm"\nsource = "tiny"'
    )
    server = RunningServer(folder, config, env=disk.environment)
    disk.keep()
    server.start()
    try:
        with httpx2.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
            row = '{"custom_id":"1","method":"POST","url":"/v1/chat/completions","body":{"model":"slow","n":1}}\n'
            upload = http.post("/v1/files", files={"file": ("in.jsonl", row)}, data={"purpose": "batch"}).json()
            order = {"input_file_id": upload["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            batch = http.post("/v1/batches", json=order).json()
            http.post(f"/v1/batches/{batch['id']}/cancel").raise_for_status()
            while (batch := http.get(f"/v1/batches/{batch['id']}").json())["status"] != "cancelled":
                pass
            errors = http.get(f"/v1/files/{batch['error_file_id']}/content").raise_for_status().text
            new = {
                "filename": "long.jsonl",
                "purpose": "batch",
                "bytes": 2 * len(row),
                "mime_type": "application/jsonl",
            }
            parts = http.post("/v1/uploads", json=new).raise_for_status().json()
            part = http.post(f"/v1/uploads/{parts['id']}/parts", files={"data": row}).raise_for_status().json()
            words, url = [sys.executable, "-m", "batchmill"], ["--server", server.url]
            for more in (
                ["deploy", "app.py:twice", "--requirements", str(tmp_path / "needs.txt")],
                ["adapters", "add", "upper", "upper", "--base", "tiny"],
            ):
                done = subprocess.run([*words, *more, *url], cwd=folder, capture_output=True, text=True, timeout=100)
                assert done.returncode == 0, done.stderr
            disk.lose_power(random.Random(1), "synced", "synced")
        server.wait()
        server.start()
        with httpx2.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
            assert http.get(f"/v1/files/{upload['id']}/content").text == row
            assert http.get(f"/v1/files/{batch['error_file_id']}/content").text == errors
            other = http.post(f"/v1/uploads/{parts['id']}/parts", files={"data": row}).raise_for_status().json()
            whole = {"part_ids": [part["id"], other["id"]]}
            file = http.post(f"/v1/uploads/{parts['id']}/complete", json=whole).raise_for_status().json()["file"]
            assert http.get(f"/v1/files/{file['id']}/content").text == 2 * row
            assert http.post("/v1/twice/latest", json={"data": 21}).json() == {"data": 42}
            [adapter] = http.get("/batchmill/v1/adapters").json()["adapters"]
            assert adapter["state"] == "ready"
        assert len(list((folder / "data" / "adapters").rglob("adapter_model.safetensors"))) == 1
    finally:
        server.kill()


OBJECTS = """
import os, signal
from pathlib import Path
from batchmill.store import folder_objects
from batchmill.store.objects import StoreObjects
for name in ("code/part", "code/more"):
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_bytes(b"1" * folder_objects.INLINE_BYTES + b"2")
objects = StoreObjects(Path("new/store").absolute().as_uri())
folder_objects.put(objects, "models/of/", Path("code"))
folder_objects.get(objects, "models/of/", Path("copy"), Path("work"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_objects_in_a_folder_and_a_copy_of_them(tmp_path: Path, disk: LossyDisk):
    """What was put is there. A copy is there whole or not at all: its name says that it is whole."""
    folder = tmp_path / "disk"
    subprocess.run([sys.executable, "-c", OBJECTS], cwd=folder, env={**os.environ, **disk.environment}, check=False)
    disk.lose_power(random.Random(1), "synced", "synced")
    objects = StoreObjects((folder / "new" / "store").as_uri())
    folder_objects.get(objects, "models/of/", folder / "again", tmp_path / "work")
    for copy in (folder / "again", folder / "copy"):
        assert sorted(path.name for path in copy.iterdir()) == ["more", "part"]
        assert {path.stat().st_size for path in copy.iterdir()} == {folder_objects.INLINE_BYTES + 1}


NAMED = """
import os, signal
from pathlib import Path
from batchmill.store.objects import StoreObjects
link = os.link
def link_and_die(source, target):
    link(source, target)
    os.kill(os.getpid(), signal.SIGKILL)
os.link = link_and_die
StoreObjects(Path("store").absolute().as_uri()).put("one", b"1" * 5000)
"""


def test_an_object_in_a_folder_has_its_content_with_its_name(tmp_path: Path, disk: LossyDisk):
    """One with other content would be taken for another writer's, and could never be put."""
    folder = tmp_path / "disk"
    subprocess.run([sys.executable, "-c", NAMED], cwd=folder, env={**os.environ, **disk.environment}, check=False)
    disk.lose_power(random.Random(1), "all", "synced")
    objects = StoreObjects((folder / "store").as_uri())
    assert objects.get("one") == b"1" * 5000
    objects.put("one", b"1" * 5000)
    assert [name for name, _ in objects.list("")] == ["one"], "what a crash leaves is no object"


def test_the_disk_of_these_tests_loses_what_was_not_synced(tmp_path: Path, disk: LossyDisk):
    """Names and bytes alike; a link is the file that it links to."""
    program = """
import os
def write(name, data, *, is_synced):
    fd = os.open(name, os.O_CREAT | os.O_WRONLY, 0o640)
    os.write(fd, data)
    if is_synced:
        os.fsync(fd)
    os.close(fd)
write("synced", b"1" * 5000, is_synced=True)
write("empty", b"2" * 5000, is_synced=False)
os.link("synced", "linked")
os.symlink("synced", "symbolic")
fd = os.open(".", os.O_RDONLY)
os.fsync(fd)
write("synced", b"3" * 5000, is_synced=False)
write("nameless", b"4", is_synced=True)
"""
    folder = tmp_path / "disk"
    subprocess.run([sys.executable, "-c", program], cwd=folder, env={**os.environ, **disk.environment}, check=True)
    disk.lose_power(random.Random(1), "synced", "synced")
    assert sorted(path.name for path in folder.iterdir()) == ["empty", "linked", "symbolic", "synced"]
    assert (folder / "empty").read_bytes() == b"" and (folder / "symbolic").read_bytes() == b"1" * 5000
    assert (folder / "linked").samefile(folder / "synced") and (folder / "synced").stat().st_mode & 0o777 == 0o640
