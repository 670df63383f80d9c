"""Results written while the job runs."""

from pathlib import Path

import pytest
from finished_job import FinishedJob, write_requests
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmill.errors import LedgerBroken
from batchmill.jobs.results.streaming_results import StreamingGather
from batchmill.store.segments.files import SegmentFolder
from batchmill.types import SegmentRef
from batchmill.wire.rows.forms import OpenAIForm, TableForm

ROWS = 24


@st.composite
def blocks(draw) -> list[tuple[list[int], bool]]:
    """Every row once, cut into blocks of ok rows and blocks of errors, in any order inside and among them."""
    order = draw(st.one_of(st.just(list(range(ROWS))), st.permutations(range(ROWS))))
    bad = draw(st.sets(st.integers(0, ROWS - 1)))
    cuts = sorted(draw(st.sets(st.integers(1, ROWS - 1), max_size=6)))
    parts = []
    for start, end in zip([0, *cuts], [*cuts, ROWS], strict=True):
        part = order[start:end]
        parts += [([n for n in part if n not in bad], False), ([n for n in part if n in bad], True)]
    return draw(st.permutations([part for part in parts if part[0]]))


@pytest.fixture(scope="module")
def openai_job(tmp_path_factory) -> FinishedJob:
    folder = tmp_path_factory.mktemp("openai")
    return FinishedJob(folder / "job", write_requests(folder / "in.jsonl", ["hi"] * ROWS), OpenAIForm())


@pytest.fixture(scope="module")
def table_job(tmp_path_factory) -> FinishedJob:
    folder = tmp_path_factory.mktemp("table")
    (folder / "in.jsonl").write_text("".join(f'{{"a":{n}.50}}\n' for n in range(ROWS)))
    return FinishedJob(folder / "job", folder / "in.jsonl", TableForm())


def stream(job: FinishedJob, output: Path, refs: list[SegmentRef]):
    gather = StreamingGather(SegmentFolder(job.segments), output, job.form, ROWS)
    try:
        for ref in refs:
            gather.offer([ref])
        return gather.finish()
    finally:
        gather.discard()


@settings(deadline=None, max_examples=60)
@given(parts=blocks())
def test_openai_rows_in_any_order_of_blocks(openai_job, tmp_path_factory, parts):
    """However rows are spread over blocks and blocks arrive, both files have their rows in input order."""
    output = tmp_path_factory.mktemp("out") / "out.jsonl"
    manifest = stream(openai_job, output, [openai_job.commit(openai_job.block(*part)) for part in parts])
    bad = sorted(number for part, failed in parts if failed for number in part)
    good = sorted(number for part, failed in parts if not failed for number in part)
    assert output.read_bytes() == b"".join(openai_job.line(number) for number in good)
    assert (manifest.ok, manifest.failed, manifest.output.rows) == (len(good), len(bad), len(good))
    errors = output.with_name("out.errors.jsonl")
    assert errors.exists() == bool(bad)
    if bad:
        assert errors.read_bytes() == b"".join(openai_job.line(number, failed=True) for number in bad)
        assert manifest.causes == {"went_wrong": (len(bad), "")}


@settings(deadline=None, max_examples=60)
@given(parts=blocks())
def test_table_rows_in_any_order_of_blocks(table_job, tmp_path_factory, parts):
    """A table has its errors among the other rows, in input order."""
    output = tmp_path_factory.mktemp("out") / "out.jsonl"
    stream(table_job, output, [table_job.commit(table_job.block(*part)) for part in parts])
    bad = {number for part, failed in parts if failed for number in part}
    assert output.read_bytes() == b"".join(table_job.line(number, number in bad) for number in range(ROWS))


def test_rows_are_written_as_they_come(openai_job, tmp_path):
    """Rows that follow each other are written at once; those behind a gap wait for it."""
    gather = StreamingGather(SegmentFolder(openai_job.segments), tmp_path / "out.jsonl", openai_job.form, ROWS)
    first, last, rest = range(8), range(16, ROWS), range(8, 16)
    seen = []
    for part in (first, last, rest):
        gather.offer([openai_job.commit(openai_job.block(part))])
        seen.append(gather.written)
    gather.discard()
    assert seen == [8, 8, ROWS]


def test_a_missing_row_is_never_published(openai_job, tmp_path):
    """Results that lack a row are refused, and nothing stays behind."""
    ref = openai_job.commit(openai_job.block(range(ROWS - 1)))
    with pytest.raises(LedgerBroken, match=f"{ROWS - 1} of {ROWS} rows"):
        stream(openai_job, tmp_path / "out.jsonl", [ref])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("again", [[5], [0], [3, 4, 5]])
def test_a_row_with_two_outcomes_stops(openai_job, tmp_path, again):
    """A row that is offered twice is never written twice."""
    refs = [openai_job.commit(openai_job.block(part)) for part in (range(6), again, range(6, ROWS))]
    with pytest.raises(LedgerBroken, match="two outcomes"):
        stream(openai_job, tmp_path / "out.jsonl", refs)


def test_a_damaged_block_stops(openai_job, tmp_path):
    """A flipped byte in a committed block is found before it reaches the results."""
    ref = openai_job.commit(openai_job.block(range(ROWS)))
    path = openai_job.segments / ref.segment
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(LedgerBroken, match="damaged"):
        stream(openai_job, tmp_path / "out.jsonl", [ref])


def test_a_row_beyond_the_dataset_stops(openai_job, tmp_path):
    """An outcome for a row that the dataset does not have is refused."""
    gather = StreamingGather(SegmentFolder(openai_job.segments), tmp_path / "out.jsonl", openai_job.form, ROWS - 1)
    with pytest.raises(LedgerBroken, match=f"row {ROWS - 1} of a dataset of {ROWS - 1}"):
        gather.offer([openai_job.commit(openai_job.block(range(ROWS)))])
    gather.discard()


def test_an_old_error_file_is_removed(openai_job, tmp_path):
    """An error file of an earlier run does not stay beside results without errors."""
    (tmp_path / "out.errors.jsonl").write_text("old")
    manifest = stream(openai_job, tmp_path / "out.jsonl", [openai_job.commit(openai_job.block(range(ROWS)))])
    assert manifest.errors is None
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_what_a_crash_left_is_replaced(openai_job, tmp_path):
    """A half-written part of a run that was killed is written anew."""
    (tmp_path / "out.jsonl.part").write_text("half a li")
    stream(openai_job, tmp_path / "out.jsonl", [openai_job.commit(openai_job.block(range(ROWS)))])
    assert (tmp_path / "out.jsonl").read_bytes() == b"".join(openai_job.line(number) for number in range(ROWS))


def test_nothing_is_taken_once_discarded(openai_job, tmp_path):
    """What a thread still offers after the results were given up opens no file again."""
    gather = StreamingGather(SegmentFolder(openai_job.segments), tmp_path / "out.jsonl", openai_job.form, ROWS)
    gather.discard()
    gather.offer([openai_job.commit(openai_job.block(range(ROWS)))])
    gather.discard()
    assert (gather.written, list(tmp_path.iterdir())) == (0, [])
