"""Results gathered when a job has ended: permuted, folded, refused, retried, cancelled."""

import io
import json
from pathlib import Path

import msgspec
import pytest
from finished_job import FinishedJob, quiet, write_requests
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmill.errors import InputChanged, LedgerBroken
from batchmill.jobs.results import row_windows
from batchmill.jobs.results.gathering import gather, gather_offloaded, partial, partial_offloaded
from batchmill.jobs.results.results import GatherOrder, Manifest
from batchmill.jobs.results.streaming_results import StreamingGather
from batchmill.store.segments.files import SegmentFolder
from batchmill.types import RowError
from batchmill.wire.rows.forms import OpenAIForm, TableForm

CONTENTS = ["a", "b", "a", "c", "b", "a", "d", "e", "c", "f", "g", "h"]
UNRUN = RowError("unrun", "it never ran")
FIRST = {"a": 0, "b": 1, "c": 3}
ROWS = len(CONTENTS)


def folded_job(folder: Path) -> FinishedJob:
    """12 requests of which 4 repeat an earlier one, planned in another order than the file's."""
    return FinishedJob(folder / "job", write_requests(folder / "in.jsonl", CONTENTS), OpenAIForm(), keys=True)


def refused_job(folder: Path) -> FinishedJob:
    """Six rows of which three are refused: no JSON, a number for a custom_id, invalid UTF-8."""
    path = write_requests(folder / "in.jsonl", ["x"] * 6)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b"not json\n"
    lines[3] = lines[3].replace(b'"c3"', b"3")
    lines[4] = lines[4].replace(b'"x"', b'"\xff"')
    path.write_bytes(b"".join(lines))
    return FinishedJob(folder / "job", path, OpenAIForm())


@pytest.fixture(scope="module")
def job_of_many_runs(tmp_path_factory) -> FinishedJob:
    return folded_job(tmp_path_factory.mktemp("runs"))


def expected(job: FinishedJob, number: int, failed: set[int], text: str = "done") -> tuple[bool, dict]:
    leader = FIRST.get(CONTENTS[number], number)
    line = json.loads(job.line(leader, leader in failed, text))
    if leader != number:
        line |= {"id": f"batch_req_{number}", "custom_id": f"c{number}", "folded_from": f"c{leader}"}
        if line["response"]:
            line["response"]["body"]["usage"]["prompt_tokens"] = 0
    return leader in failed, line


def rows_in(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_every_interleaving_gives_the_same_results(job_of_many_runs, data):
    """Whatever the order of outcomes, blocks and commits, and whatever fits in a window, the rows are right."""
    job = job_of_many_runs
    job.committed.clear()
    leaders = job.leaders
    failed = data.draw(st.sets(st.sampled_from(leaders)))
    positions = data.draw(st.permutations(range(len(leaders))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(leaders) - 1), max_size=4)))
    for start, end in zip([0, *cuts], [*cuts, len(leaders)], strict=True):
        for kind in data.draw(st.permutations([False, True])):
            part = [position for position in positions[start:end] if (leaders[position] in failed) == kind]
            if part:
                job.commit(job.block(part, kind))
    sizes = row_windows.WINDOW_ROWS, row_windows.GAP_BYTES
    row_windows.WINDOW_ROWS, row_windows.GAP_BYTES = data.draw(st.integers(1, 13)), data.draw(st.sampled_from([0, 200]))
    output = job.home / "out.jsonl"
    try:
        order = msgspec.structs.replace(job.order(output), piece_rows=data.draw(st.sampled_from([0, ROWS])))
        manifest = gather(order, quiet)
    finally:
        row_windows.WINDOW_ROWS, row_windows.GAP_BYTES = sizes
    wanted = [expected(job, number, failed) for number in range(ROWS)]
    assert rows_in(output) == [line for bad, line in wanted if not bad]
    errors = [line for bad, line in wanted if bad]
    errors_file = output.with_name("out.errors.jsonl")
    assert (rows_in(errors_file) if errors_file.exists() else []) == errors
    assert (manifest.rows, manifest.failed, manifest.folded) == (ROWS, len(errors), 4)
    assert manifest.causes.get("went_wrong", (0, ""))[0] == len(errors)


def test_both_ways_give_the_same_bytes(tmp_path):
    """Results copied while a job runs and results gathered afterwards are the same files."""
    job = FinishedJob(tmp_path / "job", write_requests(tmp_path / "in.jsonl", ["x"] * 9), OpenAIForm())
    job.run_all(failed={2, 7})
    streaming = StreamingGather(SegmentFolder(job.segments), tmp_path / "out.jsonl", job.form, 9)
    streaming.offer([ref for _, ref in job.committed])
    copied = streaming.finish()
    streaming.discard()
    first = {path.name: path.read_bytes() for path in tmp_path.glob("out*")}
    gathered = gather(job.order(tmp_path / "out.jsonl"), quiet)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out*")} == first
    assert (copied.output, copied.errors, copied.failed) == (gathered.output, gathered.errors, gathered.failed)


def test_gathering_twice_gives_the_same_bytes(tmp_path):
    """A crash while results are gathered is harmless: they are gathered again, to the byte."""
    job = folded_job(tmp_path)
    job.run_all(failed={0})
    names = [name for name in ("out.jsonl", "out.jsonl.gz", "out.jsonl.zst") for _ in range(2)]
    made = [(gather(job.order(tmp_path / name), quiet), (tmp_path / name).read_bytes()) for name in names]
    assert made[0] == made[1] and made[2] == made[3] and made[4] == made[5]


def test_the_manifest_says_what_is_in_the_files(tmp_path):
    """Paths, rows, bytes and checksums are those of the published files."""
    job = folded_job(tmp_path)
    job.run_all(failed={3})
    manifest = gather(job.order(tmp_path / "out.jsonl"), quiet)
    for file in (manifest.output, manifest.errors):
        data = Path(file.path).read_bytes()
        assert (file.rows, file.bytes) == (data.count(b"\n"), len(data))
    assert (manifest.ok, manifest.failed, manifest.unrun) == (10, 2, 0)


def test_the_newest_generation_counts(tmp_path):
    """A row that was run again has its later outcome, a row that was not keeps its own; followers go with leaders."""
    job = folded_job(tmp_path)
    job.run_all(failed={0, 3, 6})
    job.again({0, 6})
    job.run_all(failed={6}, text="again")
    (tmp_path / "out.errors.jsonl").write_text("from before")
    gather(job.order(tmp_path / "out.jsonl"), quiet)
    texts = {"a": "again"}
    wanted = [expected(job, n, {3, 6}, texts.get(CONTENTS[n], "done")) for n in range(ROWS)]
    assert rows_in(tmp_path / "out.jsonl") == [line for bad, line in wanted if not bad]
    assert [row["custom_id"] for row in rows_in(tmp_path / "out.errors.jsonl")] == ["c3", "c6", "c8"]


def test_refused_rows_become_errors(tmp_path):
    """A row that validation refused has an error line with its code, whatever its bytes are."""
    job = refused_job(tmp_path)
    job.run_all()
    manifest = gather(job.order(tmp_path / "out.jsonl"), quiet)
    assert [row["custom_id"] for row in rows_in(tmp_path / "out.jsonl")] == ["c0", "c2", "c5"]
    errors = rows_in(tmp_path / "out.errors.jsonl")
    assert [(row["custom_id"], row["error"]["code"]) for row in errors] == [
        (None, "invalid_json"), (3, "invalid_custom_id"), ("c4", "invalid_encoding"),
    ]  # fmt: skip
    assert (manifest.rejected, manifest.failed) == (3, 3)


def test_rows_that_never_ran_are_cancelled(tmp_path):
    """After a cancel every row without an outcome, and whoever follows it, is an error that says so."""
    job = folded_job(tmp_path)
    ran = [position for position, number in enumerate(job.leaders) if number != 0]
    job.commit(job.block(ran))
    manifest = gather(job.order(tmp_path / "out.jsonl", unrun=UNRUN), quiet)
    errors = rows_in(tmp_path / "out.errors.jsonl")
    assert [(row["custom_id"], row["error"]["code"]) for row in errors] == [(f"c{n}", "unrun") for n in (0, 2, 5)]
    assert (manifest.unrun, manifest.failed, manifest.ok) == (3, 3, 9)


def test_nothing_at_all_may_have_run(tmp_path):
    """A job that was cancelled before its first row has an empty output and an error for every row."""
    job = folded_job(tmp_path)
    manifest = gather(job.order(tmp_path / "out.jsonl", unrun=UNRUN), quiet)
    assert (manifest.ok, manifest.unrun, (tmp_path / "out.jsonl").read_bytes()) == (0, ROWS, b"")


def test_a_missing_row_is_never_published(tmp_path):
    """A job that was not cancelled and lacks a row has no results."""
    job = folded_job(tmp_path)
    job.commit(job.block([0, 1, 2]))
    with pytest.raises(LedgerBroken, match="rows have no outcome"):
        gather(job.order(tmp_path / "out.jsonl"), quiet)
    assert list(tmp_path.glob("out*")) == []


def test_two_outcomes_in_a_generation_stop(tmp_path):
    """A row that is committed twice in one generation is a broken ledger."""
    job = folded_job(tmp_path)
    job.run_all()
    job.commit(job.block([2]))
    with pytest.raises(LedgerBroken, match="generation 0: 9 outcomes for 8 rows"):
        gather(job.order(tmp_path / "out.jsonl"), quiet)


def test_a_commit_of_another_generation_stops(tmp_path):
    """Blocks count for the generation that they were written in."""
    job = folded_job(tmp_path)
    job.run_all()
    job.plans.append(job.plan)
    job.committed = [(1, ref) for _, ref in job.committed]
    with pytest.raises(LedgerBroken, match="generation 0, committed for 1"):
        gather(job.order(tmp_path / "out.jsonl"), quiet)


def test_rows_at_wrong_positions_stop(tmp_path):
    """A block whose rows are not those of the plan belongs to another job."""
    job, other = folded_job(tmp_path), tmp_path / "other"
    other.mkdir()
    stranger = FinishedJob(other / "job", write_requests(other / "in.jsonl", ["x"] * ROWS), OpenAIForm())
    job.commit(stranger.block(range(8)))
    with pytest.raises(LedgerBroken, match="rows are not those that the plan has"):
        gather(job.order(tmp_path / "out.jsonl"), quiet)


def test_a_damaged_segment_stops(tmp_path):
    """A flipped byte in a committed block is found, and nothing is published."""
    job = folded_job(tmp_path)
    job.run_all()
    path = job.segments / job.committed[0][1].segment
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(LedgerBroken, match="damaged"):
        gather(job.order(tmp_path / "out.jsonl"), quiet)
    assert list(tmp_path.glob("out*")) == []


def test_a_changed_input_stops_followers(tmp_path):
    """Followers are written from their own rows: an input that changed is said, not copied."""
    job = folded_job(tmp_path)
    job.run_all()
    write_requests(tmp_path / "in.jsonl", reversed(CONTENTS))
    with pytest.raises(InputChanged):
        gather(job.order(tmp_path / "out.jsonl"), quiet)
    assert list(tmp_path.glob("out*")) == []


def test_progress_ends_at_one(tmp_path):
    """Progress goes from 0 to 1 and never back."""
    job = folded_job(tmp_path)
    job.run_all()
    results: list[float] = []
    gather(job.order(tmp_path / "out.jsonl"), results.append)
    assert results == sorted(results) and results[-1] == 1.0


def test_partial_results_are_the_rows_so_far(tmp_path):
    """While a job runs its finished rows, their followers and refused rows can be read in row order."""
    job = folded_job(tmp_path)
    by_row = {number: position for position, number in enumerate(job.leaders)}
    job.commit(job.block([by_row[7], by_row[0]]), job.block([by_row[3]], failed=True))
    both, out, errors = io.BytesIO(), io.BytesIO(), io.BytesIO()
    assert partial(job.order(tmp_path / "out.jsonl"), both) == 6
    assert partial(job.order(tmp_path / "out.jsonl"), out, errors) == 6
    rows = [json.loads(line)["custom_id"] for line in both.getvalue().splitlines()]
    assert rows == ["c0", "c2", "c3", "c5", "c7", "c8"]
    assert [json.loads(line)["custom_id"] for line in errors.getvalue().splitlines()] == ["c3", "c8"]
    assert out.getvalue().count(b"\n") == 4


def test_orders_travel_as_json(tmp_path):
    """A child process gets its order as JSON and answers in JSON, as often as it is asked."""
    job = folded_job(tmp_path)
    job.run_all()
    order = msgspec.json.encode(job.order(tmp_path / "out.jsonl"))
    assert msgspec.json.decode(order, type=GatherOrder) == job.order(tmp_path / "out.jsonl")
    assert msgspec.json.decode(gather_offloaded(order, quiet), type=Manifest).rows == ROWS
    for _ in range(2):  # again, as after the child that was at it has been killed
        assert partial_offloaded(msgspec.json.encode(job.order(tmp_path / "partial.jsonl")), quiet) == b"12"
    assert (tmp_path / "partial.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()


def test_table_followers_name_the_row_they_follow(tmp_path):
    """In a table a follower has its own columns, its leader's output, and the number of the row it follows."""
    (tmp_path / "in.jsonl").write_text('{"a":1}\n{"a":2}\n{"a":1}\n')
    job = FinishedJob(tmp_path / "job", tmp_path / "in.jsonl", TableForm(), keys=True)
    job.run_all()
    gather(job.order(tmp_path / "out.jsonl"), quiet)
    rows = rows_in(tmp_path / "out.jsonl")
    assert [row.get("folded_from") for row in rows] == [None, None, 0]
    assert [row["a"] for row in rows] == [1, 2, 1]
    assert rows[2]["output"] == rows[0]["output"]
