"""Damage to what a job keeps of its input, told from an input that changed."""

from __future__ import annotations

import os

import pytest
from ledgered_job import LedgeredJob

from batchmill.datasets.layout import SEAL, SUMMED_LINES, check
from batchmill.datasets.sealed import SealedRows
from batchmill.errors import DatasetDamaged, InputChanged
from batchmill.jobs.ledger.audit import ANEW
from batchmill.states import PauseReason

FILES = (SEAL, *SUMMED_LINES, "sums.json")


@pytest.fixture
def job(tmp_path):
    job = LedgeredJob(tmp_path, 100, 50)
    segment = job.segment()
    job.run(segment, range(50))
    segment.close()
    yield job
    job.ledger.close()


def contents(home):
    return {path.name: path.read_bytes() for path in home.iterdir()}


def damages(path):
    """A file with a flipped bit, cut short, and gone; an empty one only gone."""
    data = path.read_bytes()
    if data:
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        yield "flipped"
        path.write_bytes(data[: len(data) // 2])
        yield "cut"
    path.unlink()
    yield "gone"


def test_damage_is_found_told_and_mended(job):
    """Whichever file of the index is damaged: readers blame it and not the input, verify finds it, rebuild mends it."""
    home = job.files.dataset
    whole = contents(home)
    for name in FILES:
        for how in damages(home / name):
            with pytest.raises(DatasetDamaged, match=name) as raised:
                check(home)
            assert raised.value.reason is PauseReason.DATASET_DAMAGED and "ledger rebuild job" in raised.value.message
            assert any(name in each for each in job.verify().broken), (name, how)
            assert any("from the input" in each for each in job.rebuild().damaged), (name, how)
            assert contents(home) == whole, (name, how)
            assert job.verify().broken == [] and job.verify().rows_done == 50


def test_an_input_that_changed_is_not_sealed_again(job, tmp_path):
    """Damage beside a changed input is not mended: rebuild asks for it and changes nothing."""
    source, home = tmp_path / "in.jsonl", job.files.dataset
    (home / "offsets.u64").unlink()
    before, text = contents(home), source.read_bytes()
    source.write_bytes(text.replace(b"text 7", b"text X"))
    with pytest.raises(InputChanged, match="restore it"):
        job.rebuild()
    assert contents(home) == before and not (job.files.home / ANEW).exists()
    source.write_bytes(text)
    os.utime(source, (1, 1))
    job.rebuild()
    assert job.verify().broken == []


def test_a_changed_input_is_blamed_itself(job, tmp_path):
    """With a sound index the input is to blame for rows that are not what they were."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(source.read_bytes().replace(b"text 7", b"text X"))
    rows = SealedRows(job.files.dataset)
    try:
        with pytest.raises(InputChanged, match="restore it") as raised:
            rows.read(0, rows.rows)
        assert raised.value.reason is PauseReason.INPUT_CHANGED
    finally:
        rows.close()
