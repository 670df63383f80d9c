"""What the batch API of every provider promises, as tests. Subclass `ProviderSuite` in a `Test…` class."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from fakes.provider_fake import LOST_REPLY, ProviderFake, Wrong
from msgspec.structs import replace

from batchmill.engines.provider_batch.provider import JobGone, JobRefused, ProviderApi, RowReply, TryAgain, Upload
from batchmill.errors import AuthRefused, InvalidRow
from batchmill.types import RemoteJob, Request


class ProviderSuite:
    """The fixtures `provider` (a ProviderApi that calls `fake`, started) and `fake`, and what follows."""

    name = ""  # of the provider
    create = ("POST", "")  # method and part of the path of the call that creates a job
    look = ("GET", "")  # and of the one that looks at it
    tells_errors = True  # rows that failed have a line of their own
    tells_undone = True  # and so have rows that were not run
    finds_running = True  # by its tag, also before it has ended

    def request(self, number: int) -> Request:
        raise AssertionError("override request")

    def wrong_request(self) -> Request:
        """A row that the provider cannot take."""
        raise AssertionError("override wrong_request")

    def check(self, number: int, reply: RowReply) -> None:
        """That `reply` is the answer to `request(number)`."""
        raise AssertionError("override check")

    def job(self, numbers: list[int], tag: str = "bm-test-0001", **fields: Any) -> RemoteJob:
        runs = [(number, 1) for number in numbers]
        return RemoteJob(tag, self.name, "intent", runs, len(numbers), created=time.time(), **fields)

    def spool(self, provider: ProviderApi, tmp_path: Path, numbers: list[int]) -> Upload:
        lines = [provider.encode(number, self.request(number)) for number in numbers]
        limits, path = provider.limits, tmp_path / "upload"
        path.write_bytes(limits.head + limits.between.join(line.data for line in lines) + limits.tail)
        return Upload(path, lines[0].group, len(lines), path.stat().st_size)

    async def submit(self, provider: ProviderApi, tmp_path: Path, numbers: list[int], **fields: Any) -> RemoteJob:
        upload = self.spool(provider, tmp_path, numbers)
        job = await provider.upload(self.job(numbers, **fields), upload)
        return await provider.create(job, upload)

    # rows

    def test_a_wrong_row_is_told(self, provider: ProviderApi) -> None:
        """A row that the provider cannot take is refused by name before anything is sent."""
        with pytest.raises(InvalidRow) as caught:
            provider.encode(0, self.wrong_request())
        assert caught.value.code and caught.value.message

    def test_a_line_is_one_line(self, provider: ProviderApi) -> None:
        """A row is one line of JSON."""
        data = provider.encode(7, self.request(7)).data
        assert b"\n" not in data
        json.loads(data)

    # a job's way

    async def test_submit_and_collect(self, provider: ProviderApi, fake: ProviderFake, tmp_path: Path) -> None:
        """A job is submitted, runs, ends, and every row's answer is there under its number."""
        numbers = [3, 4, 9, 100_000]
        job = await self.submit(provider, tmp_path, numbers)
        assert (job.state, bool(job.id)) == ("submitted", True)
        assert (await provider.refresh(job)).state == "submitted"
        fake.finish()
        job = await provider.refresh(job)
        assert job.state == "ended"
        assert job.remote_state
        replies = await collect(provider, job)
        assert sorted(replies) == numbers
        for number, reply in replies.items():
            assert (reply.status, reply.error, reply.is_undone, reply.is_garbled) == (200, None, False, False)
            assert reply.body is not None and b"\n" not in reply.body
            self.check(number, reply)

    async def test_errors_of_rows(self, provider: ProviderApi, fake: ProviderFake, tmp_path: Path) -> None:
        """A row that failed has an error with a code and a message; its neighbours are answered."""
        job = await self.submit(provider, tmp_path, [0, 1, 2, 3])
        fake.finish({1: "error"})
        job = await provider.refresh(job)
        replies = await collect(provider, job, refused=not self.tells_errors)
        if not self.tells_errors:
            assert all(reply.error is None for reply in replies.values())
            return
        failed = {number for number, reply in replies.items() if reply.error is not None and not reply.is_undone}
        assert failed == {1}
        error = replies[1].error
        assert error is not None and error.code and error.message

    async def test_partial_results(self, provider: ProviderApi, fake: ProviderFake, tmp_path: Path) -> None:
        """A job that expired brings the rows that were run; the others are undone, or nothing is said of them."""
        job = await self.submit(provider, tmp_path, [0, 1, 2, 3])
        fake.finish({2: "undone", 3: "undone"}, expired=True)
        job = await provider.refresh(job)
        assert job.state == "ended"
        replies = await collect(provider, job, refused=True)
        done = {number for number, reply in replies.items() if reply.error is None}
        undone = {number for number, reply in replies.items() if reply.is_undone}
        assert done == ({0, 1} if self.tells_errors else set())
        assert undone == ({2, 3} if self.tells_undone else set())

    async def test_cancel(self, provider: ProviderApi, fake: ProviderFake, tmp_path: Path) -> None:
        """A job that is cancelled ends; to cancel it again says how it stands."""
        job = await self.submit(provider, tmp_path, [0, 1])
        job = await provider.cancel(job)
        assert job.state in ("cancelling", "ended")
        fake.finish({0: "undone", 1: "undone"})
        assert (await provider.cancel(job)).state == "ended"
        assert (await provider.refresh(job)).state == "ended"

    # what gets lost

    async def test_nothing_to_find(self, provider: ProviderApi, fake: ProviderFake, tmp_path: Path) -> None:
        """A submission that never came to be is provably not there, whatever else is."""
        await self.submit(provider, tmp_path, [0, 1], tag="bm-another-0001")
        fake.finish()
        assert await provider.find(self.job([0, 1])) is None

    async def test_lost_reply_of_create(self, provider: ProviderApi, fake: ProviderFake, tmp_path: Path) -> None:
        """A job whose creation was never answered is found again, and its rows are there once it has ended."""
        upload = self.spool(provider, tmp_path, [0, 1, 2])
        job = await provider.upload(self.job([0, 1, 2]), upload)
        fake.fail(*self.create, LOST_REPLY)
        with pytest.raises(TryAgain) as caught:
            await provider.create(job, upload)
        assert not caught.value.is_unseen
        if not self.finds_running:
            fake.finish()
        found = await provider.find(self.job([0, 1, 2]))
        assert found is not None and found.id
        assert len(fake.jobs) == 1
        fake.finish()
        found = await provider.refresh(found)
        assert sorted(await collect(provider, found)) == [0, 1, 2]

    async def test_unknown_job(self, provider: ProviderApi, tmp_path: Path) -> None:
        """A job that the provider does not know is gone."""
        with pytest.raises(JobGone):
            await provider.refresh(self.job([0], id=self.unknown_id()))

    def unknown_id(self) -> str:
        return "nobody"

    # what goes wrong on the way

    @pytest.mark.parametrize("status", [429, 500, 502, 503])
    async def test_troubles_pass(self, provider: ProviderApi, fake: ProviderFake, tmp_path: Path, status: int) -> None:
        """A provider that is throttling or in trouble is to be asked again; only a throttled call was never seen."""
        upload = self.spool(provider, tmp_path, [0, 1])
        job = await provider.upload(self.job([0, 1]), upload)
        fake.fail(*self.create, Wrong(status, headers={"Retry-After": "7"} if status == 429 else {}))
        with pytest.raises(TryAgain) as caught:
            await provider.create(job, upload)
        assert (caught.value.is_unseen, caught.value.retry_after_s) == ((True, 7.0) if status == 429 else (False, None))
        job = await provider.create(job, upload)
        assert job.state == "submitted"

    async def test_a_reply_that_is_none(self, provider: ProviderApi, fake: ProviderFake, tmp_path: Path) -> None:
        """A page of a proxy instead of JSON is to be asked again."""
        job = await self.submit(provider, tmp_path, [0, 1])
        fake.fail(*self.look, Wrong(200, b"<html>", {"Content-Type": "text/html"}))
        with pytest.raises(TryAgain):
            await provider.refresh(job)

    async def test_refused_credentials(self, provider: ProviderApi, fake: ProviderFake, tmp_path: Path) -> None:
        """Credentials that are refused pause the job, and no message holds them."""
        job = await self.submit(provider, tmp_path, [0, 1])
        fake.fail(*self.look, self.refusal(fake.key))
        with pytest.raises(AuthRefused) as caught:
            await provider.refresh(job)
        assert caught.value.message and fake.key not in caught.value.message

    def refusal(self, key: str) -> Wrong:
        body = {"error": {"type": "authentication_error", "message": f"invalid key {key}"}}
        return Wrong(401, body)

    async def test_rows_stay_in_their_job(self, provider: ProviderApi, tmp_path: Path) -> None:
        """Cleaning up touches nothing that is still to be read."""
        job = await self.submit(provider, tmp_path, [5])
        job = replace(job, state="ended")
        await provider.clean_up(job)
        assert (await provider.refresh(job)).id == job.id


async def collect(provider: ProviderApi, job: RemoteJob, *, refused: bool = False) -> dict[int, RowReply]:
    """Every row's reply. With `refused` the job may be refused after what is there."""
    replies: dict[int, RowReply] = {}
    try:
        async for some in provider.results(job):
            replies |= some
    except JobRefused as refusal:
        assert refused and refusal.message
    return replies
