import json
import os
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path

import pytest
from blake3 import blake3
from dataset_rows import openai_row
from datasets.killed_validators import kill_pools
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmill.datasets import layout
from batchmill.datasets.checking import fan_out, inspection
from batchmill.datasets.orders import SourcePart, ValidatedChunk
from batchmill.datasets.sealed import SealedRows, load_seal
from batchmill.datasets.sealing import SealOrder, seal
from batchmill.errors import InputChanged, InvalidDataset, StorageFull
from batchmill.types import DatasetSpec
from batchmill.wire.rows.forms import OpenAIForm


def offsets(home):
    found = array("Q")
    found.frombytes((home / layout.OFFSETS).read_bytes())
    return found.tolist()


def rejected(home):
    return [json.loads(line) for line in (home / layout.REJECTED).read_text().splitlines()]


def test_offsets_and_rows(write, sealed, home):
    """Rows lie where `offsets.u64` says, blank lines are not rows, and a last line needs no end."""
    path = write(openai_row("a") + b"\n\n  \n" + openai_row("b"))
    report = sealed(path)
    a = len(openai_row("a"))
    assert offsets(home) == [0, a + 5, a + 5 + len(openai_row("b"))]
    assert (report.seal.rows, report.problems_total, report.rejected) == (2, 0, 0)
    assert load_seal(home) == report.seal
    assert SealedRows(home).read(0, 2) == [openai_row("a"), openai_row("b")]


def test_bom_and_crlf(write, sealed, home):
    """A BOM lies before row 0 and CRLF line ends are not part of a row."""
    path = write(b"\xef\xbb\xbf" + openai_row("a") + b"\r\n" + openai_row("b") + b"\r\n")
    sealed(path)
    assert offsets(home)[0] == 3
    assert SealedRows(home).read(0, 2) == [openai_row("a"), openai_row("b")]


def test_several_files(write, sealed, home):
    """Files count as one dataset, each with its own BOM and line numbers; empty ones add nothing."""
    bom = b"\xef\xbb\xbf"
    one, none = write(bom + openai_row("a"), "1.jsonl"), write(b"", "2.jsonl")
    two = write(bom + openai_row("b") + b"\n\nnope\n" + openai_row("c"), "3.jsonl")
    report = sealed(one, none, two)
    assert SealedRows(home).read(0, 4) == [openai_row("a"), openai_row("b"), b"nope", openai_row("c")]
    assert [(p.path, p.line, p.row) for p in report.problems] == [(two, 3, 2)]
    assert [file.path for file in report.seal.files] == [one, two]
    assert [file.path for file in report.seal.sources] == [one, none, two]


def test_sha256_covers_the_source(write, sealed):
    """The dataset's sha256 is that of the digests of its files' blocks."""
    text = openai_row("a") + b"\n"
    report = sealed(write(text))
    assert report.seal.digest == blake3(blake3(text).digest()).hexdigest()


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from([b'{"a": 1}', b"", b" ", b"x", b'{"b":"\xc3\xa9"}', b"\xff", b"[1]", b'{"c":2}\r']), max_size=40
    ),
    st.booleans(),
)
def test_any_lines(lines, ends):
    """Whatever the lines are, each that is not blank is a row with its own bytes, line number and verdict."""
    text = b"\n".join([b'{"first": 1}', *lines]) + (b"\n" if ends else b"")
    with tempfile.TemporaryDirectory() as folder:
        path, home = Path(folder, "t.jsonl"), Path(folder, "home")
        path.write_bytes(text)
        home.mkdir()
        report = seal(SealOrder(DatasetSpec([str(path)])), home, lambda _: None)
        expected = [(n, line.strip()) for n, line in enumerate(text.split(b"\n"), 1) if line.strip()]
        rows = SealedRows(home)
        assert rows.read(0, rows.rows) == [line for _, line in expected]
        assert [rows.line_of(n) for n in range(rows.rows)] == [n for n, _ in expected]
        bad = {b"x": "invalid_json", b"\xff": "invalid_encoding", b"[1]": "invalid_json"}
        flaws = [(bad[line], n, row) for row, (n, line) in enumerate(expected) if line in bad]
        assert [(p.code, p.line, p.row) for p in report.problems] == flaws
        assert [(r["row"], r["code"]) for r in rejected(home)] == [(row, code) for code, _, row in flaws]
        rows.close()


def test_chunks_and_ranges_join(monkeypatch, write, sealed, home):
    """However small ranges and chunks are, every line is found once, with its line number."""
    monkeypatch.setattr(inspection, "RANGE_BYTES", 97)
    monkeypatch.setattr(inspection, "CHUNK_BYTES", 31)
    monkeypatch.setattr(inspection, "TAIL_BYTES", 7)
    monkeypatch.setattr(inspection, "BLOCK_BYTES", 16)
    lines = [b'{"a":%d,"t":"%s"}' % (n, b"x" * (n * 37 % 400)) for n in range(200)]
    lines[50:50] = [b"", b" ", b"nope"]
    report = sealed(write(lines))
    kept = [line for line in lines if line.strip()]
    rows = SealedRows(home)
    assert rows.read(0, rows.rows) == kept
    assert rows.read(17, 120) == kept[17:120]
    assert rows.read_many([150, 3, 77]) == [kept[150], kept[3], kept[77]]
    assert [rows.line_of(n) for n in (49, 50, 51)] == [50, 53, 54]
    assert [(p.line, p.row) for p in report.problems] == [(53, 50)]


def test_endless_line(monkeypatch, write, sealed, home):
    """A line far longer than the limit is read no further than shows it, and the next rows are fine."""
    monkeypatch.setattr(inspection, "RANGE_BYTES", 1000)
    monkeypatch.setattr(inspection, "TAIL_BYTES", 100)
    report = sealed(write([b'{"a":1}', b'{"a":"' + b"x" * 50_000 + b'"}', b'{"a":2}']), spec={"line_bytes_max": 2000})
    rows = SealedRows(home)
    first, long, last = rows.read(0, 3)
    assert (first, last) == (b'{"a":1}', b'{"a":2}')
    assert len(long) < 4000
    assert [(p.code, p.line) for p in report.problems] == [("line_too_long", 2)]


@pytest.mark.parametrize(("size", "codes"), [(100, []), (101, ["line_too_long"])])
def test_line_limit(write, sealed, size, codes):
    """A line of exactly the limit passes, without its end; one byte more does not."""
    report = sealed(write(b'{"a":"' + b"x" * (size - 8) + b'"}\r\n'), spec={"line_bytes_max": 100})
    assert [p.code for p in report.problems] == codes


def test_problems_are_capped_but_counted(write, sealed, home):
    """Only the first problems are listed; every refused row is in the list of refused rows."""
    report = sealed(write([b'{"a":1}'] + [b"x"] * 30), problems_max=10)
    assert ([p.line for p in report.problems], report.problems_total) == (list(range(2, 12)), 30)
    assert [r["row"] for r in rejected(home)] == list(range(1, 31))


def test_duplicates_name_both_lines(write, sealed, home):
    """Each row but the first with a custom_id is refused, and the message names both lines and files."""
    one = write([openai_row("a"), b"", openai_row("b"), openai_row("a")], "1.jsonl")
    two = write([openai_row("c"), openai_row("b")], "2.jsonl")
    report = sealed(one, two)
    assert [(p.code, p.row, p.message) for p in report.problems] == [
        ("duplicate_custom_id", 2, "line 4 repeats the custom_id 'a' of line 1: each row needs its own"),
        (
            "duplicate_custom_id",
            4,
            f"line 2 repeats the custom_id 'b' of line 3 of {one}: each row needs its own",
        ),
    ]
    assert (report.rejected, report.seal.rejected) == (2, 2)
    assert [r["row"] for r in rejected(home)] == [2, 4]


def test_duplicates_of_refused_rows(write, sealed, home):
    """A row refused for another reason keeps that reason, and still claims its custom_id."""
    broken = json.dumps({"custom_id": "a", "url": "/x"}).encode()
    report = sealed(write([openai_row("z"), broken, openai_row("a"), broken]))
    assert [(p.code, p.row) for p in report.problems] == [
        ("missing_body", 1),
        ("duplicate_custom_id", 2),
        ("missing_body", 3),
    ]
    assert [r["row"] for r in rejected(home)] == [1, 2, 3]


def test_an_empty_dataset_is_refused(write, sealed):
    """Nothing at all, and nothing but blank lines, are both `empty_file`."""
    for text in (b"", b"\n \n"):
        with pytest.raises(InvalidDataset) as caught:
            sealed(write(text))
        assert caught.value.code == "empty_file"


def test_a_file_that_changes_meanwhile(write, home):
    """A file that is written to while it is read is never sealed."""
    path = write([openai_row(f"r{n}") for n in range(10)])

    def grow(_):
        with open(path, "ab") as file:
            file.write(b"\n")

    with pytest.raises(InputChanged, match="changed while it was read"):
        seal(SealOrder(DatasetSpec([path])), home, grow)
    assert not (home / layout.SEAL).exists()


def test_copy(write, sealed, home):
    """With `copy` the rows are read from a copy: the source may change or go."""
    path = write([openai_row("a"), openai_row("b")])
    report = sealed(path, spec={"copy": True})
    os.unlink(path)
    assert SealedRows(home).read(0, 2) == [openai_row("a"), openai_row("b")]
    assert Path(report.seal.files[0].path).parent == home
    assert report.seal.sources[0].path == path


def test_sealing_again_replaces_what_lay_there(write, sealed, home):
    """A second sealing into the same folder, as after a crash, leaves nothing of the first."""
    sealed(write([openai_row("a"), openai_row("a"), b"x"]))
    report = sealed(write([openai_row("b")], "other.jsonl"))
    assert (report.seal.rows, rejected(home)) == (1, [])
    assert SealedRows(home).read(0, 1) == [openai_row("b")]
    assert {path.name for path in home.iterdir()} == {
        layout.SEAL, layout.OFFSETS, layout.CHUNKS, layout.CHECKSUMS, layout.REJECTED, layout.SUMS,
    }  # fmt: skip


def test_progress_ends_at_one(write, home):
    """Progress grows from conversion to the last row and ends at 1."""
    seen: list[float] = []
    seal(SealOrder(DatasetSpec([write(b"a\n1\n2\n", "t.csv")])), home, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1


@pytest.fixture
def many(write):
    """More rows than one process checks alone."""
    lines = [openai_row(f"row-{n}", {"text": "x" * 200}) for n in range(6000)]
    lines[10] = b"nope"
    lines[5000] = openai_row("row-3")
    return write(lines)


def test_children_find_what_one_process_finds(monkeypatch, many, sealed, home):
    """Validators in children give the same files and problems as this process does alone."""
    assert os.path.getsize(many) > fan_out.INLINE_BYTES_MAX
    monkeypatch.setattr(inspection, "RANGE_BYTES", 100_000)
    apart = sealed(many, processes=2)
    files = {path.name: path.read_bytes() for path in home.iterdir()}
    monkeypatch.setattr(fan_out, "INLINE_BYTES_MAX", 1 << 30)
    assert sealed(many) == apart
    assert {path.name: path.read_bytes() for path in home.iterdir()} == files
    assert [(p.code, p.row) for p in apart.problems] == [("invalid_json", 10), ("duplicate_custom_id", 5000)]


def test_findings_wait_for_their_turn_in_bounded_memory(monkeypatch, many, sealed):
    """With no room for findings that come early, everything still comes, in order."""
    monkeypatch.setattr(inspection, "RANGE_BYTES", 50_000)
    monkeypatch.setattr(fan_out, "HELD_BYTES_MAX", 0)
    report = sealed(many, processes=3)
    assert (report.seal.rows, report.rejected) == (6000, 2)


def test_a_validator_that_dies_is_an_error(many, home):
    """A validator that is killed ends the sealing with an error that says where, and leaves no process."""
    order = SealOrder(DatasetSpec([many]))
    with pytest.MonkeyPatch.context() as patch:
        pools = kill_pools(patch, 1)
        with pytest.raises(InvalidDataset, match=r"died \(signal 9\) on bytes \d+-\d+ of") as caught:
            seal(order, home, lambda _: None)
    assert caught.value.code == "validator_died"
    assert all(link._process.poll() is not None for link in pools[0]._links)
    assert not (home / layout.SEAL).exists()


@pytest.mark.parametrize("processes", [0, 1])
def test_files_that_fail_under_the_validators(write, processes):
    """A file that is gone or shorter when it is read is the same clear error in a child as in this process."""
    path = write([openai_row("a")])
    size = os.path.getsize(path)
    cases = [
        (SourcePart(0, path + ".gone", path, 0, 0, size), InvalidDataset, "cannot be read: No such file"),
        (SourcePart(0, path, path, 0, 0, size + 1), InputChanged, "became shorter"),
    ]
    for part, error, message in cases:
        order = SealOrder(DatasetSpec([path]), form=OpenAIForm(), processes=processes)
        with fan_out.validators(order, processes * (fan_out.INLINE_BYTES_MAX + 1)) as validator:
            assert isinstance(validator, fan_out.ValidatorPool if processes else fan_out.InlineValidator)
            with pytest.raises(error, match=message):
                list(validator.check([part]))


def test_chunks_are_bounded(write):
    """What is checked at once is bounded, however many lines a file has and however short they are."""
    path = write(b"{}\n" * 700_000)
    part = SourcePart(0, path, path, 0, 0, os.path.getsize(path))
    inspector = inspection.Inspector(SealOrder(DatasetSpec([path]), form=OpenAIForm()))
    found = [found for range_ in inspection.ranges([part]) for found in inspector.inspect(range_)]
    chunks = [chunk for chunk in found if isinstance(chunk, ValidatedChunk)]
    assert max(chunk.end - chunk.start for chunk in chunks) <= layout.CHUNK_BYTES + len(b"{}\n")
    assert sum(chunk.rows for chunk in chunks) == 700_000
    inspector.close()


def test_a_validator_ends_with_its_orders():
    """A validator whose orders end, as when the one who gave them is killed, ends too."""
    done = subprocess.run(
        [sys.executable, "-m", "batchmill.datasets.checking.validator"], input=b"", capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_full_disk_is_storage_full(write, sealed, monkeypatch):
    """No space left becomes StorageFull, which pauses a job rather than failing it."""

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull, match="no space is left"):
        sealed(write([openai_row("a")]))
