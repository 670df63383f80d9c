"""`batchmill.AsyncClient`: the asyncio shell over the SDK's core."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any, BinaryIO, TypeVar

import httpx

from batchmill.client import adapter_calls, calls, connection, llm_calls, procedures
from batchmill.client.async_model import AsyncModel
from batchmill.client.messages import PIECE_BYTES, TIMEOUT_S, Ask, Broken, Reply, Request, Send, SendFile, Sleep, Steps
from batchmill.client.procedures import Pages, Source
from batchmill.client.streams import Bytes, Lines, Stream, Views, refusal
from batchmill.client.writing import is_past, part_of
from batchmill.types import EngineEvent, JobView, LedgerReport, RemoteJob, Wait
from batchmill.wire.native import (
    Change,
    DeployReply,
    Estimated,
    FileInfo,
    JobPage,
    KeyInfo,
    MadeKey,
    ModelInfo,
    NewKey,
    Planned,
    QuotaInfo,
)
from batchmill.wire.native_adapters import AdapterInfo
from batchmill.wire.native_llms import LlmChange, LlmInfo, NewLlm, QuarantinedRequest
from batchmill.wire.previews import SealReport

T = TypeVar("T")


class AsyncClient:
    """A batchmill server, for programs.

    Requests are repeated only where that can do nothing twice. What the server refuses is raised as the error of
    `batchmill.errors` that it is, with the server's `code`; no answer at all is Unavailable (`unreachable`).

    Args:
        base_url: "http://127.0.0.1:8000"; None: BATCHMILL_SERVER.
        api_key: None: BATCHMILL_API_KEY, or none where the server asks for none.
        timeout_s: seconds without a byte, after which a request is given up; what may take long by itself (a preview,
            an upload, gathering partial results) is waited for.

    Concurrency: any number of tasks of one event loop may use one client.
    """

    def __init__(
        self, base_url: str | None = None, api_key: str | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._address = connection.address(base_url, api_key)
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(base_url=self._address.base_url, headers=self._address.headers)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- jobs ---------------------------------------------------------------------------------------------------------

    async def submit(self, inputs: Source | Iterable[Source], **work: Any) -> AsyncJob:
        """Run every row of some files.

        Args:
            inputs: paths, ids or FileInfo of uploaded files, or open binary files; several are one dataset.
            work: the fields of `batchmill.wire.native.NewJob`: `model` (or `models`: the first is for rows that name
                none), `prompt`, `system`, `url`, `params`, `format`, `on_invalid`, `dedupe`, `budget` (USD),
                `priority` (-100..100), `deadline` (seconds since the epoch) or `completion_s` (from now), `labels`,
                `output_format`, `together`.

        Raises: InvalidInput for what cannot be run as it is.
        """
        return AsyncJob(self, (await self.run(procedures.submit(inputs, work))).job)

    async def job(self, job_id: str) -> AsyncJob:
        """A job that exists. Raises: UnknownName."""
        return AsyncJob(self, await self.call(calls.show(job_id)))

    def jobs(
        self, *, state: str | None = None, label: str | None = None, model: str | None = None,
        since: float | None = None,
    ) -> AsyncIterator[JobView]:  # fmt: skip
        """Jobs, the newest first. `label`: "NAME" or "NAME=VALUE"; `since`: seconds since the epoch."""

        def page(after: str | None) -> Ask[JobPage]:
            return calls.jobs(state=state, label=label, model=model, since=since, limit=None, after=after)

        return self._all(Pages(page, lambda found: found.jobs))

    async def validate(self, inputs: Source | Iterable[Source], **work: Any) -> SealReport:
        """Check every row; run none. `work`: as for `submit`, as far as it says what is computed."""
        return await self.run(procedures.preview(calls.validate, inputs, work))

    async def plan(self, inputs: Source | Iterable[Source], **work: Any) -> Planned:
        """Explain the order in which rows would run."""
        return await self.run(procedures.preview(calls.plan, inputs, work))

    async def estimate(self, inputs: Source | Iterable[Source], **work: Any) -> Estimated:
        """Estimate tokens, cost and time before anything is spent."""
        return await self.run(procedures.preview(calls.estimate, inputs, work))

    # -- models, files, keys ------------------------------------------------------------------------------------------

    async def models(self) -> list[ModelInfo]:
        """The models that this key may use, with their adapters."""
        return (await self.call(calls.models())).models

    async def deploy(self, source: Any, **settings: Any) -> DeployReply:
        """Make a Python function a model of the server's, or a new version of one.

        Args:
            source: a function or class, FILE.py:NAME, package.module:NAME, a folder, or git+https://HOST/REPO@REVISION.
            settings: the fields of `batchmill.wire.deploys.DeployOrder` (`name`, `branch`, `requirements`: a file or
                its text, `python`, `environment`, `secrets`, `workers`, `gpus`, `memory_bytes`, `timeout_s`,
                `batch_size`, `batch_window_s`, `is_idempotent`, `is_shared`, `received_shapes`,
                `examples`), and `include` (further files), `dataframe_mode` with `example_dataframe`, `input_json`,
                `output_json`.

        Raises: ModelFailed (`deploy_failed`) with the traceback of code that does not work: the version before stays.
        """
        return await self.run(procedures.deploy(source, settings))

    def model(self, name: str) -> AsyncModel:
        """A deployed function, to look after; nothing is asked yet."""
        return AsyncModel(self, name)

    async def add_adapter(
        self, name: str, source: str | os.PathLike[str], *, base: str, token: str | None = None
    ) -> AdapterInfo:
        """Register an adapter of a language model under the next version of its name, and wait until it is ready.

        Args:
            source: a folder of this machine, which is sent; ORG/NAME of a model hub or s3://BUCKET/PREFIX (gs://, az://),
                where the server may fetch from there.
            base: the model it is for.
            token: for a model hub, by the name of a secret that the server keeps: "secret:NAME".

        Raises: ModelFailed (`adapter_failed`) where it cannot be had or does not fit its base.
        """
        return await self.run(adapter_calls.add(name, source, base=base, token=token))

    async def adapters(self, base: str | None = None) -> list[AdapterInfo]:
        """The adapters that this key may use, all versions; those for one model."""
        return (await self.call(adapter_calls.adapters(base))).adapters

    async def adapter(self, name: str, version: int | None = None) -> AdapterInfo:
        """One version; without a number the newest that is ready."""
        return await self.call(adapter_calls.adapter(name, version))

    async def remove_adapter(self, name: str, version: int | None = None) -> list[AdapterInfo]:
        """Remove a version, or all. Jobs that were given it keep it until they end."""
        return (await self.call(adapter_calls.remove_adapter(name, version))).adapters

    async def llms(self) -> list[LlmInfo]:
        """The language models that the server serves itself, and how their engines are."""
        return (await self.call(llm_calls.llms())).llms

    async def llm(self, name: str) -> LlmInfo:
        return await self.call(llm_calls.llm(name))

    async def deploy_llm(self, name: str, base_model: str, **settings: Any) -> LlmInfo:
        """Have the server serve a language model under a name. Its engine starts with the first request.

        Args:
            base_model: a model of the server's configuration, or an id of a model hub that it allows.
            settings: the fields of `batchmill.wire.native_llms.NewLlm`: `engine_args`, `hf_token`, `replicas_min`,
                `replicas_max`, `cooldown_s`, `scale_up_requests`, `memory_bytes`, `gpus`, `takes_adapters`,
                `preloaded_adapters`, `description`.

        Raises: UnknownName (`unknown_base_model`); Conflict for a name that is taken; InvalidInput.
        """
        return await self.call(llm_calls.create(llm_calls.filled(NewLlm, settings, name=name, base_model=base_model)))

    async def update_llm(self, name: str, **changes: Any) -> LlmInfo:
        """Change what is said, as for `deploy_llm`; None is as the base model has it. What runs answers meanwhile."""
        return await self.call(llm_calls.change(name, llm_calls.filled(LlmChange, changes)))

    async def remove_llm(self, name: str) -> LlmInfo:
        """Remove a deployment: it answers no more. Jobs that have begun go on."""
        return await self.call(llm_calls.remove(name))

    async def llm_events(self, name: str, after: float | None = None) -> list[EngineEvent]:
        """What became of a deployment lately, the oldest first. `after`: seconds since the epoch."""
        return (await self.call(llm_calls.events(name, after))).events

    async def start_llm(self, name: str) -> LlmInfo:
        """Have an engine ready now; `llm` tells how that goes."""
        return await self.call(llm_calls.start(name))

    async def stop_llm(self, name: str) -> LlmInfo:
        """Let it answer nothing until it is started."""
        return await self.call(llm_calls.stop(name))

    async def quarantine(self) -> list[QuarantinedRequest]:
        """Requests of this project that engines of the server died of."""
        return (await self.call(llm_calls.quarantine())).requests

    async def clear_quarantine(self, digest: str | None = None) -> list[QuarantinedRequest]:
        """Let one of them go, or all. Returns which."""
        return (await self.call(llm_calls.clear_quarantine(digest))).requests

    async def upload(
        self,
        source: str | os.PathLike[str] | BinaryIO,
        *,
        filename: str | None = None,
        expires_s: float | None = None,
    ) -> FileInfo:
        """Send a file, piece by piece.

        Args:
            filename: what it is called; its end (.jsonl, .csv, .parquet, with .gz or .zst) tells what it holds.
            expires_s: seconds from now after which the server removes it; None: what the server does by itself.
        """
        return await self.run(procedures.upload(source, filename=filename, expires_s=expires_s))

    def files(self) -> AsyncIterator[FileInfo]:
        """Files, the newest first."""
        return self._all(Pages(lambda after: calls.files(limit=None, after=after), lambda page: page.files))

    async def file(self, file_id: str) -> FileInfo:
        return await self.call(calls.file(file_id))

    async def delete_file(self, file_id: str) -> None:
        """Raises: Conflict (`file_in_use`) while an unfinished job reads it."""
        await self.call(calls.delete_file(file_id))

    def read_file(self, file_id: str) -> AsyncIterator[bytes]:
        """The bytes of a file, in pieces; a broken connection is taken up where it broke."""
        return self.read(Bytes(calls.content(file_id)))

    async def create_key(self, key: NewKey) -> MadeKey:
        """A new key, which is shown this once. Raises: Forbidden for more than the maker's key may do."""
        return await self.call(calls.create_key(key))

    async def keys(self) -> list[KeyInfo]:
        return (await self.call(calls.keys())).keys

    async def quotas(self) -> list[QuotaInfo]:
        """What the project has of everything that it has a quota of, and what it may have."""
        return (await self.call(calls.quotas())).quotas

    async def revoke_key(self, key_id: str, *, with_minted: bool = False) -> KeyInfo:
        """End a key, at once; `with_minted`: and those that it minted."""
        return await self.call(calls.revoke_key(key_id, with_minted=with_minted))

    # -- the steps of the core ----------------------------------------------------------------------------------------

    async def call(self, what: Ask[T]) -> T:
        """Ask for one thing of `batchmill.client.calls`."""
        return await self.run(procedures.ask(what))

    async def run(self, steps: Steps[T]) -> T:
        """Take the steps of a procedure; returns its value."""
        answer: Reply | None = None
        failure: Broken | None = None
        while True:
            try:
                step = steps.send(answer) if failure is None else steps.throw(failure)
            except StopIteration as done:
                return done.value
            answer = failure = None
            try:
                match step:
                    case Send(request):
                        answer = await self._send(request, request.body)
                    case SendFile(request, file):
                        answer = await self._send(request, _pieces(file))
                    case Sleep(seconds):
                        await asyncio.sleep(seconds)
            except Broken as broken:
                failure = broken
            except BaseException:
                steps.close()
                raise

    async def _send(self, request: Request, content: bytes | AsyncIterator[bytes] | None) -> Reply:
        try:
            return connection.reply_of(
                await self._http.request(
                    request.method, request.path, params=request.query, headers=request.headers, content=content,
                    timeout=connection.timeout(request, self._timeout_s),
                )
            )  # fmt: skip
        except httpx.TransportError as error:
            raise connection.broken(error, self._address.base_url) from error

    async def _all(self, pages: Pages[T]) -> AsyncIterator[T]:
        while not pages.is_over:
            for item in await self.run(pages.next()):
                yield item

    async def read(self, stream: Stream[T]) -> AsyncIterator[T]:
        """What a stream reads, over as many connections as it takes."""
        while not stream.is_over:
            try:
                async with aclosing(self._stream_once(stream, stream.request())) as items:
                    async for item in items:
                        yield item
            except httpx.TransportError as error:
                await asyncio.sleep(stream.broke(connection.broken(error, self._address.base_url)))
            except Broken as broken:
                await asyncio.sleep(stream.broke(broken))

    async def _stream_once(self, stream: Stream[T], request: Request) -> AsyncIterator[T]:
        async with self._http.stream(
            request.method, request.path, params=request.query, headers=request.headers,
            timeout=connection.timeout(request, self._timeout_s),
        ) as response:  # fmt: skip
            if response.status_code >= 400:
                await response.aread()
                raise refusal(connection.reply_of(response))
            stream.begin(response.status_code, response.headers)
            async for piece in response.aiter_raw():
                for item in stream.feed(piece):
                    yield item
                if stream.is_over:
                    return
            for item in stream.end():
                yield item


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    """The rest of a file, read beside the event loop."""
    while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
        yield piece


class AsyncJob:
    """A job at a server. `view` is what was last heard of it.

    Raises, everywhere: UnknownName once the job is gone, InvalidTransition for what does not fit its state.
    """

    def __init__(self, client: AsyncClient, view: JobView) -> None:
        self._client = client
        self.view = view

    @property
    def id(self) -> str:
        return self.view.id

    def __repr__(self) -> str:
        return f"<AsyncJob {self.id}: {self.view.state}>"

    async def refresh(self) -> JobView:
        """Ask how the job is."""
        self.view = await self._client.call(calls.show(self.id))
        return self.view

    async def watch(self, interval_s: float = 1.0) -> AsyncIterator[JobView]:
        """Views of the job, one an interval, until it is paused or has ended; broken connections are taken up."""
        async with aclosing(self._client.read(Views(self.id, interval_s))) as views:
            async for view in views:
                self.view = view
                yield view

    async def wait(self, timeout_s: float | None = None, interval_s: float = 1.0) -> JobView:
        """Wait until the job is paused or has ended; returns the last view of it.

        Raises: TimeoutError; the job goes on.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        async with aclosing(self.watch(interval_s)) as views:
            async for view in views:
                if is_past(until, time.monotonic(), view):
                    raise TimeoutError(f"the job {self.id} is {view.state} after {timeout_s:g} s")
        return self.view

    def results(self) -> AsyncIterator[dict[str, Any]]:
        """The lines of the result file of a job that has ended, as objects."""
        return self._client.read(Lines(Bytes(calls.results(self.id))))

    def errors(self) -> AsyncIterator[dict[str, Any]]:
        """The lines of the error file. Raises: UnknownName (`no_file`) where no row failed."""
        return self._client.read(Lines(Bytes(calls.errors(self.id))))

    def partial(self) -> AsyncIterator[dict[str, Any]]:
        """The rows that have their outcome so far, in row order, also while the job runs."""
        return self._client.read(Lines(Bytes(calls.partial(self.id), is_resumable=False)))

    async def download(self, path: str | os.PathLike[str], *, errors: bool = False) -> None:
        """Write the result (or error) file to `path`, which gets its name once it is whole."""
        stream = Bytes(calls.errors(self.id) if errors else calls.results(self.id))
        with part_of(path) as file:
            async with aclosing(self._client.read(stream)) as pieces:
                async for piece in pieces:
                    await asyncio.to_thread(file.write, piece)

    async def pause(self) -> JobView:
        """Rows in flight may finish; `resume` goes on from there."""
        return await self._steer("pause")

    async def resume(self) -> JobView:
        return await self._steer("resume")

    async def cancel(self) -> JobView:
        """Finished rows are kept and written; the rest become errors."""
        return await self._steer("cancel")

    async def retry(self) -> JobView:
        """Run the rows again that failed, and only those."""
        return await self._steer("retry")

    async def fail_rows(self) -> JobView:
        """Rows that failed and wait for their service become errors now; a paused job goes on so."""
        return await self._steer("fail_rows")

    async def amend(
        self, *, priority: int | None = None, deadline: float | None = None, budget: float | None = None
    ) -> JobView:
        """Change what is given: priority (-100..100), deadline (seconds since the epoch), budget (USD)."""
        change = Change(priority, deadline, budget)
        self.view = await self._client.call(calls.amend(self.id, change))
        return self.view

    async def explain(self) -> Wait:
        """Why the job waits, or goes no faster."""
        return await self._client.call(calls.explain(self.id))

    async def remote(self) -> list[RemoteJob]:
        """The jobs at providers that hold rows of this one, in the order of their making."""
        return (await self._client.call(calls.remote(self.id))).jobs

    async def settle_remote(self, tag: str, remote_id: str | None) -> RemoteJob:
        """Say what became of a submission that is unknown: the provider's id, or None where it never came to be.

        Raises: InvalidTransition for one that is not unknown, or while the job runs.
        """
        return await self._client.call(calls.settle_remote(self.id, tag, remote_id))

    async def remove(self) -> JobView:
        """Remove the job, which has ended, and its results."""
        return await self._client.call(calls.remove(self.id))

    async def verify(self) -> LedgerReport:
        """Audit the record of which rows are done; needs an admin's key."""
        return await self._client.call(calls.verify(self.id))

    async def _steer(self, verb: calls.Steering) -> JobView:
        self.view = await self._client.call(calls.steer(self.id, verb))
        return self.view
