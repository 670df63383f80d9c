import os
import random
import shutil
import subprocess
import sys

import pytest
from dataset_rows import openai_row

from batchmill.datasets import sealed as sealed_module
from batchmill.datasets.sealed import SealedRows, load_seal
from batchmill.errors import InputChanged, InvalidDataset

N = 3000
LINES = [openai_row(f"row-{n}", {"text": "x" * (n % 200)}) for n in range(N)]


@pytest.fixture
def path(write, sealed):
    path = write(LINES)
    sealed(path)
    return path


def spoil(path, row, text=b"#"):
    """Change a byte of a row and leave size and time as they were."""
    stat = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(sum(len(line) + 1 for line in LINES[:row]) + 20)
        file.write(text)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_any_range(path, home):
    """Any contiguous range of rows comes back as it was written."""
    rows = SealedRows(home)
    chance = random.Random(1)
    for first, last in [(0, N), (0, 0), (N, N), *(sorted(chance.choices(range(N + 1), k=2)) for _ in range(50))]:
        assert rows.read(first, last) == LINES[first:last]
    rows.close()
    rows.close()


def test_ranges_as_lines(write, sealed, home):
    """A range also comes as one piece of bytes: a line for each row, across blank lines, files and missing ends."""
    bom = b"\xef\xbb\xbf"
    texts = [
        bom + b"\n".join(LINES[:1000]) + b"\n",
        b"\r\n".join(LINES[1000:1500]) + b"\r\n\r\n  \n" + b"\r\n".join(LINES[1500:2000]),
        b"\n\n" + bom + b"\n \n".join(LINES[2000:]),
    ]
    sealed(*[write(text, f"{number}.jsonl") for number, text in enumerate(texts)])
    rows = SealedRows(home)
    chance = random.Random(3)
    for first, last in [
        (0, rows.rows),
        (0, 0),
        *(sorted(chance.choices(range(rows.rows + 1), k=2)) for _ in range(50)),
    ]:
        lines = rows.read_lines(first, last)
        assert lines.count(b"\n") == last - first and (not lines or lines.endswith(b"\n"))
        assert [line.strip() for line in lines.split(b"\n")[:-1]] == rows.read(first, last)
    rows.close()


def test_any_rows(path, home, monkeypatch):
    """Scattered rows come back in the order asked for, and the cache stays within its bound."""
    monkeypatch.setattr(sealed_module, "CACHE_BYTES_MAX", 150_000)
    rows = SealedRows(home)
    chance = random.Random(2)
    for _ in range(20):
        numbers = chance.choices(range(N), k=100)
        assert rows.read_many(numbers) == [LINES[n] for n in numbers]
        assert sum(len(block.data) for block in rows._cache.values()) == rows._cache_bytes <= 150_000


def test_a_changed_byte_is_seen(path, home):
    """A byte that changed is an error that names file and rows; rows of other blocks are still read."""
    spoil(path, 1500)
    rows = SealedRows(home)
    with pytest.raises(InputChanged, match=r"in.jsonl changed since it was sealed \(rows \d+ to \d+ .*--restart"):
        rows.read(1400, 1600)
    with pytest.raises(InputChanged):
        rows.read_many([1500])
    assert rows.read(0, 10) == LINES[:10]


def test_a_file_of_another_size_is_refused(path, home):
    """A file that grew, shrank or is gone is refused before anything of it is read."""
    with open(path, "ab") as file:
        file.write(b"\n")
    with pytest.raises(InputChanged):
        SealedRows(home).read(0, 1)
    os.truncate(path, 1000)
    with pytest.raises(InputChanged):
        SealedRows(home).read(0, 1)
    os.unlink(path)
    with pytest.raises(InputChanged):
        SealedRows(home).read_many([0])


def test_a_file_that_shrinks_while_it_is_open(path, home):
    """A file that is cut after the first read is an error, not a short row."""
    rows = SealedRows(home)
    rows.read(0, 1)
    os.truncate(path, 100_000)
    with pytest.raises(InputChanged):
        rows.read(N - 1, N)


def test_a_restored_file_is_fine(path, home, tmp_path):
    """A copy of the file in its place has another time and inode, and the same bytes: it is read."""
    shutil.copyfile(path, tmp_path / "copy")
    os.replace(tmp_path / "copy", path)
    os.utime(path, ns=(1, 1))
    assert SealedRows(home).read(5, 9) == LINES[5:9]


def test_no_seal(home):
    """A folder without a seal is not a dataset."""
    with pytest.raises(InvalidDataset, match="no sealed dataset"):
        load_seal(home)


def test_workers_start_lean():
    """The reader, and sealing until it has something to do, import nothing heavy."""
    code = (
        "import sys, batchmill.datasets.sealed, batchmill.datasets.sealing, batchmill.datasets.checking.validator;"
        "print({'numpy', 'pyarrow', 'rich', 'sqlalchemy', 'aiohttp', 'zstandard'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
