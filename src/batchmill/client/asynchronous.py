"""`batchmill.AsyncClient`; `batchmill.Client` is generated from it by tools/generate_sync.py."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, Unpack

from batchmill.client import calls, llm_calls
from batchmill.client.async_resources import AsyncJob, AsyncModel
from batchmill.client.calls import typed_request
from batchmill.client.differences import Difference, differences, pairs_of, take
from batchmill.client.frames import is_data, write_data
from batchmill.client.inputs import (
    DeployOptions,
    JobOptions,
    LlmChanges,
    LlmOptions,
    Source,
    Upload,
    WorkOptions,
    adapter_bundle,
    described,
    filename_of,
    function_bundle,
    is_adapter_folder,
    is_at_server,
    opened,
    size_of,
    sources_of,
)
from batchmill.client.job_ends import check_ended
from batchmill.client.messages import (
    ATTEMPTS_MAX,
    TIMEOUT_S,
    Broken,
    HttpReply,
    HttpRequest,
    TypedRequest,
    backoff_s,
    may_repeat,
    retry_after_s,
    unreachable,
    value_of,
)
from batchmill.client.pairs import async_sleep, load_transport, run_in_thread
from batchmill.client.progress import progress_of
from batchmill.client.queries import check_installed, names_input, query_copies
from batchmill.client.schema_classes import (
    OptionsT,
    check_models,
    has_code,
    models_of,
    refused,
    settings_of,
    with_version,
)
from batchmill.client.streams import FileContent, Stream, refusal
from batchmill.errors import BatchmillError, Forbidden, InvalidInput, ModelFailed
from batchmill.types import EngineEvent, JobView
from batchmill.wire import operations as table
from batchmill.wire.adapter_bundles import ADAPTER_MEDIA
from batchmill.wire.native import (
    DeployReply,
    Estimated,
    FileInfo,
    KeyInfo,
    MadeKey,
    ModelInfo,
    NewJob,
    NewKey,
    Planned,
    QuotaInfo,
    SealReport,
    Work,
)
from batchmill.wire.native_models import AdapterInfo, LlmChange, LlmInfo, NewAdapter, NewLlm, QuarantinedRequest

if TYPE_CHECKING:
    import pyarrow

    from batchmill.client.async_transport import AsyncTransport

T = TypeVar("T")

FETCHING, FAILED = "fetching", "failed"  # states of an adapter
POLL_S_MIN, POLL_S_MAX = 0.2, 5.0  # between two looks at an adapter that is being fetched


class AsyncClient:
    """An asyncio client of a batchmill server.

    Requests are repeated only where that can do nothing twice. What the server refuses is raised as the error of
    `batchmill.errors` that it is, with the server's `code`; no answer at all is Unavailable (`unreachable`).

    Args:
        base_url: "http://127.0.0.1:8000"; None: BATCHMILL_SERVER.
        api_key: None: BATCHMILL_API_KEY, or none where the server asks for none.
        timeout_s: seconds without a byte, after which a request is given up; what may take long by itself (a preview,
            an upload, gathering partial results) is waited for.
        transport: carries requests elsewhere or otherwise; the other arguments are not used then.

    Concurrency: any number of tasks of one event loop may use one AsyncClient, any number of threads one Client.
    """

    def __init__(
        self, base_url: str | None = None, api_key: str | None = None, *, timeout_s: float = TIMEOUT_S,
        transport: AsyncTransport | None = None,
    ) -> None:  # fmt: skip
        self._transport = transport or load_transport("async_transport").AsyncHttpTransport.to(
            base_url, api_key, timeout_s
        )

    async def close(self) -> None:
        """Close the connections to the server."""
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- jobs ---------------------------------------------------------------------------------------------------------

    async def submit(self, inputs: Source | Iterable[Source], **options: Unpack[JobOptions]) -> AsyncJob:
        """Run every row of some files.

        Args:
            inputs: paths, ids or FileInfo of uploaded files, or open binary files; several are one dataset.
            options: the fields of `batchmill.wire.native.NewJob`; `model` is short for `models` with one name.

        Raises: InvalidInput for what cannot be run as it is.
        """
        described(NewJob, ["checked before anything is sent"], options, may_have_code=True)
        options = await self._with_schema_version(options)
        uploaded: list[str] = []
        try:
            job = described(NewJob, await self._file_ids(inputs, uploaded), options)
            accepted = await self.call(calls.submit(job, secrets.token_hex(16)))
        except BatchmillError as error:
            # Without a reply the server may have taken the job: then its files are the job's.
            if error.code != "unreachable":
                await self.discard(uploaded)
            raise
        return AsyncJob(self, accepted.job)

    async def run(
        self, data: Any, *, wait: bool = True, progress: bool | None = None, **options: Unpack[JobOptions]
    ) -> AsyncJob:
        """Run every row of some data: as `batchmill.run`, at the server.

        Args:
            data: what `submit` takes, or data in memory: a frame or table, a dict of columns, an iterable of rows.
                It is uploaded as Parquet, rows as JSON lines.
            wait: until the job has ended. With `limit` or `sample`, until these rows have run: frames have them then.
            progress: show a bar; None: in a notebook and on a terminal.
            options: as for `submit`. Results of tables are Parquet.

        Raises: as `submit`; JobPaused, InvalidDataset.
        """
        described(NewJob, ["checked before anything is sent"], options, may_have_code=True)
        if not is_data(data):
            job = await self.submit(data, **options)
        else:
            with tempfile.TemporaryDirectory(prefix="batchmill-upload-") as folder:
                path = Path(folder, "data")
                written = await run_in_thread(write_data, data, path)
                source = path.rename(path.with_suffix(written.suffix))
                if written.shape is not None and options.get("output") is None:
                    options.setdefault("output_format", "parquet")
                job = await self.submit(source, **options)
                job.shape = written.shape or job.shape
        if wait:
            await job.show_progress(progress_of(progress))
            check_ended(job.view, "resume() continues it")
        return job

    async def job(self, job_id: str) -> AsyncJob:
        """An existing job. Raises: UnknownName."""
        return AsyncJob(self, await self.call(calls.show(job_id)))

    async def jobs(
        self, *, state: str | None = None, label: str | None = None, model: str | None = None,
        since: float | None = None,
    ) -> AsyncIterator[JobView]:  # fmt: skip
        """Jobs, the newest first. `label`: "NAME" or "NAME=VALUE"; `since`: seconds since the epoch."""
        after: str | None = None
        while True:
            what = calls.jobs(state=state, label=label, model=model, since=since, limit=None, after=after)
            page = await self.call(what)
            for view in page.jobs:
                yield view
            if (after := page.after) is None:
                return

    async def diff(
        self, left: str | AsyncJob, right: str | AsyncJob, *, by: str | None = None
    ) -> AsyncGenerator[Difference]:
        """The rows whose answers differ between two jobs that have ended.

        Args:
            by: the column to match rows by, for jobs over different inputs; None: rows have the number that they have
                in the same input.

        Raises: InvalidInput where rows cannot be matched, or the server has no file of the results.
        """
        with tempfile.TemporaryDirectory(prefix="batchmill-results-") as folder:
            copies = []
            for side, each in (("left", left), ("right", right)):
                (home := Path(folder, side)).mkdir()
                copies.append(await (await self._job_of(each)).copy_results(home))
            rows = [copy.rows() for copy in copies]
            views, as_text = [copy.view for copy in copies], any(copy.is_csv for copy in copies)
            found = differences(pairs_of(rows, views, by, Path(folder, "matched"), as_text=as_text))
            while some := await run_in_thread(take, found):
                for difference in some:
                    yield difference

    async def sql(self, job: str | AsyncJob, query: str) -> pyarrow.Table:
        """The rows of a query over a job that has ended, by DuckDB in this process: the server runs none.

        Args:
            query: a SELECT over the tables `results` and `input`, which are copied to a temporary folder: the input
                only for a query that names it. It reads no other file.

        Raises: InvalidInput for what DuckDB refuses (`invalid_query`), and as `diff` for the results.
        """
        check_installed()
        with tempfile.TemporaryDirectory(prefix="batchmill-results-") as name:
            folder, found = Path(name), await self._job_of(job)
            copy = await found.copy_results(folder)
            inputs = await found.copy_inputs(folder) if names_input(query) else []
            return await run_in_thread(query_copies, query, copy, inputs, folder)

    async def _job_of(self, job: str | AsyncJob) -> AsyncJob:
        return await self.job(job) if isinstance(job, str) else job

    async def validate(self, inputs: Source | Iterable[Source], **options: Unpack[WorkOptions]) -> SealReport:
        """Check every row without running any. `options`: those of `submit` that affect the rows."""
        return await self._preview(calls.validate, inputs, options)

    async def plan(self, inputs: Source | Iterable[Source], **options: Unpack[WorkOptions]) -> Planned:
        """Explain the order in which rows would run."""
        return await self._preview(calls.plan, inputs, options)

    async def estimate(self, inputs: Source | Iterable[Source], **options: Unpack[WorkOptions]) -> Estimated:
        """Estimate tokens, cost and time before anything is spent."""
        return await self._preview(calls.estimate, inputs, options)

    # -- models, files, keys ------------------------------------------------------------------------------------------

    async def models(self) -> list[ModelInfo]:
        """The models that this key may use, with their adapters."""
        return (await self.call(calls.models())).models

    async def deploy(self, source: Any, **options: Unpack[DeployOptions]) -> DeployReply:
        """Deploy a Python function as a model of the server, or as a new version of one.

        Args:
            source: a function or class, FILE.py:NAME, package.module:NAME, a folder, or git+https://HOST/REPO@REVISION.
            options: the fields of `batchmill.wire.bundles.DeployOrder` (`requirements` is a file or its text), and
                `include` (further files), `dataframe_mode` with `example_dataframe`, `input_json`, `output_json`.
                With kind="schema", the source is a class that validates answers of jobs, whose `validator` names it.

        Raises: ModelFailed (`deploy_failed`) with the traceback of code that does not work: the version before stays.
        """
        with function_bundle(source, options) as bundle:
            return await self.send_bundle(bundle)

    async def _with_schema_version(self, options: OptionsT) -> OptionsT:
        """Deploy the class of an order, if its schema is one that validates in Python: the order names the version.

        Raises: Forbidden for a key that may not, with the way out; InvalidInput beside models without answers.
        """
        if not has_code(options):
            return options
        source: Any = options["schema"]
        if names := models_of(options):
            check_models(names, await self.models())
        try:
            reply = await self.deploy(source, **settings_of(options))
        except Forbidden as error:
            raise refused(source.__name__, error) from None
        return with_version(options, reply.version)

    async def send_bundle(self, bundle: BinaryIO) -> DeployReply:
        """Deploy an archive of code. It is sent once: without a reply, the version may exist."""
        return await self.call(calls.deploy(size_of(bundle)), bundle)

    def model(self, name: str) -> AsyncModel:
        """A deployed function. Sends no request."""
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
        if is_adapter_folder(source, token):
            with adapter_bundle(os.fspath(source)) as bundle:
                headers = {"content-type": ADAPTER_MEDIA, "content-length": str(size_of(bundle))}
                info = await self.call(typed_request(table.UPLOAD_ADAPTER, name, headers=headers, base=base), bundle)
        else:
            info = await self.call(
                typed_request(table.REGISTER_ADAPTER, body=NewAdapter(name, base, os.fspath(source), token))
            )
        poll_s = POLL_S_MIN
        while info.state == FETCHING:
            await self.sleep(poll_s)
            poll_s = min(2 * poll_s, POLL_S_MAX)
            info = await self.adapter(name, info.version)
        if info.state == FAILED:
            raise ModelFailed(f"the adapter {info.own_name} cannot be used: {info.message}", code="adapter_failed")
        return info

    async def adapters(self, base: str | None = None) -> list[AdapterInfo]:
        """All versions of the adapters that this key may use, or of those for one model."""
        return (await self.call(typed_request(table.LIST_ADAPTERS, base=base))).adapters

    async def adapter(self, name: str, version: int | None = None) -> AdapterInfo:
        """One version of an adapter; without a number the newest that is ready."""
        return await self.call(typed_request(table.SHOW_ADAPTER, name, version=version))

    async def remove_adapter(self, name: str, version: int | None = None) -> list[AdapterInfo]:
        """Remove a version, or all. Jobs that use it keep it until they end."""
        return (await self.call(typed_request(table.REMOVE_ADAPTER, name, version=version))).adapters

    async def llms(self) -> list[LlmInfo]:
        """The language models that the server deploys, and the state of their engines."""
        return (await self.call(llm_calls.llms())).llms

    async def llm(self, name: str) -> LlmInfo:
        return await self.call(llm_calls.llm(name))

    async def deploy_llm(self, name: str, base_model: str, **options: Unpack[LlmOptions]) -> LlmInfo:
        """Deploy a language model under a name. Its engine starts with the first request.

        Args:
            base_model: a model of the server's configuration, or an id of a model hub that it allows.
            settings: the fields of `batchmill.wire.native_models.NewLlm`: `engine_args`, `hf_token`, `replicas_min`,
                `replicas_max`, `cooldown_s`, `scale_up_requests`, `memory_bytes`, `gpus`, `takes_adapters`,
                `preloaded_adapters`, `description`.

        Raises: UnknownName (`unknown_base_model`); Conflict for a name that is taken; InvalidInput.
        """
        return await self.call(llm_calls.create(llm_calls.filled(NewLlm, options, name=name, base_model=base_model)))

    async def update_llm(self, name: str, **changes: Unpack[LlmChanges]) -> LlmInfo:
        """Change settings, as for `deploy_llm`; None resets one. The old engine serves until the new one is ready."""
        return await self.call(llm_calls.change(name, llm_calls.filled(LlmChange, changes)))

    async def remove_llm(self, name: str) -> LlmInfo:
        """Remove a deployment. Jobs that have begun continue."""
        return await self.call(llm_calls.remove(name))

    async def llm_events(self, name: str, after: float | None = None) -> list[EngineEvent]:
        """The recent events of a deployment, the oldest first. `after`: seconds since the epoch."""
        return (await self.call(llm_calls.events(name, after))).events

    async def start_llm(self, name: str) -> LlmInfo:
        """Start an engine; `llm` shows its progress."""
        return await self.call(llm_calls.start(name))

    async def stop_llm(self, name: str) -> LlmInfo:
        """Stop a deployment until it is started again."""
        return await self.call(llm_calls.stop(name))

    async def quarantine(self) -> list[QuarantinedRequest]:
        """The requests of this project that crashed engines of the server."""
        return (await self.call(llm_calls.quarantine())).requests

    async def clear_quarantine(self, digest: str | None = None) -> list[QuarantinedRequest]:
        """Release one quarantined request, or all. Returns which."""
        return (await self.call(llm_calls.clear_quarantine(digest))).requests

    async def upload(
        self,
        source: Upload,
        *,
        filename: str | None = None,
        expires_s: float | None = None,
    ) -> FileInfo:
        """Send a file, piece by piece.

        Args:
            filename: what it is called; its end (.jsonl, .csv, .parquet, with .gz or .zst) tells what it holds.
            expires_s: seconds from now after which the server removes it; None: what the server does by itself.
        """
        if isinstance(source, str | os.PathLike):
            with opened(source) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                name = filename or os.path.basename(source)
                return await self.call(calls.upload(name, expires_s=expires_s, size_bytes=size_bytes), file)
        if filename is None:
            raise InvalidInput("a file object has no name: say filename=, its end tells what it holds")
        return await self.call(calls.upload(filename, expires_s=expires_s, size_bytes=None), source)

    async def files(self) -> AsyncIterator[FileInfo]:
        """Files, the newest first."""
        after: str | None = None
        while True:
            page = await self.call(calls.files(limit=None, after=after))
            for info in page.files:
                yield info
            if (after := page.after) is None:
                return

    async def file(self, file_id: str) -> FileInfo:
        return await self.call(calls.file(file_id))

    async def delete_file(self, file_id: str) -> None:
        """Raises: Conflict (`file_in_use`) while an unfinished job reads it."""
        await self.call(calls.delete_file(file_id))

    def read_file(self, file_id: str) -> AsyncIterator[bytes]:
        """The bytes of a file, in pieces. Resumes where a connection broke."""
        return self.read(FileContent(calls.content(file_id)))

    async def create_key(self, key: NewKey) -> MadeKey:
        """Create a key, which is shown only once. Raises: Forbidden if it would have more rights than this one."""
        return await self.call(calls.create_key(key))

    async def keys(self) -> list[KeyInfo]:
        return (await self.call(calls.keys())).keys

    async def quotas(self) -> list[QuotaInfo]:
        """The project's usage and limit of everything that has a quota."""
        return (await self.call(calls.quotas())).quotas

    async def revoke_key(self, key_id: str, *, with_minted: bool = False) -> KeyInfo:
        """Revoke a key at once; `with_minted`: with all keys that were made with it."""
        return await self.call(calls.revoke_key(key_id, with_minted=with_minted))

    async def discard(self, file_ids: list[str]) -> None:
        """Delete files as far as possible; failures are not reported."""
        for file_id in file_ids:
            with contextlib.suppress(BatchmillError):
                await self.delete_file(file_id)

    async def _file_ids(self, inputs: Source | Iterable[Source], uploaded: list[str]) -> list[str]:
        """The ids of all inputs. Uploads local files, and adds their ids to `uploaded`."""
        file_ids: list[str] = []
        for source in sources_of(inputs):
            if isinstance(source, FileInfo):
                file_ids.append(source.id)
            elif is_at_server(source):
                file_ids.append(source)
            else:
                file_id = (await self.upload(source, filename=filename_of(source))).id
                uploaded.append(file_id)
                file_ids.append(file_id)
        return file_ids

    async def _preview(
        self, call: Callable[[Work], TypedRequest[T]], inputs: Source | Iterable[Source], options: WorkOptions
    ) -> T:
        """Preview a dataset, and delete what was uploaded for it."""
        described(Work, ["checked before anything is sent"], options, may_have_code=True)
        options = await self._with_schema_version(options)
        uploaded: list[str] = []
        try:
            reply = await self.call(call(described(Work, await self._file_ids(inputs, uploaded), options)))
        except BatchmillError:
            await self.discard(uploaded)
            raise
        await self.discard(uploaded)
        return reply

    # -- requests -----------------------------------------------------------------------------------------------------

    async def call(self, what: TypedRequest[T], file: BinaryIO | None = None) -> T:
        """Send a request of `batchmill.client.calls` and read its reply. Repeats it if that is safe.

        Args:
            file: the body. It is read once, so that such a request is sent once.

        Raises: what the server refuses; Unavailable (`unreachable`) where no reply arrives.
        """
        attempts_max = ATTEMPTS_MAX if file is None else 1
        for attempt in range(attempts_max):
            is_last = attempt + 1 == attempts_max
            try:
                reply = await self._send(what.request, file)
            except Broken as broken:
                if is_last or not may_repeat(what, broken):
                    raise unreachable(broken) from None
                await self.sleep(backoff_s(attempt))
                continue
            if is_last or not may_repeat(what, reply):
                return value_of(what, reply)
            await self.sleep(backoff_s(attempt, retry_after_s(reply.headers)))
        raise AssertionError("the last attempt returns or raises")

    async def read(self, stream: Stream[T]) -> AsyncGenerator[T]:
        """Read a stream of `batchmill.client.streams`, over as many connections as needed."""
        while not stream.is_over:
            try:
                async with aclosing(self._read_once(stream)) as items:
                    async for item in items:
                        yield item
            except Broken as broken:
                await self.sleep(stream.broke(broken))

    async def sleep(self, seconds: float) -> None:
        """Wait between two attempts."""
        await async_sleep(seconds)

    async def _send(self, request: HttpRequest, file: BinaryIO | None) -> HttpReply:
        return await self._transport.send(request, file)

    async def _read_once(self, stream: Stream[T]) -> AsyncGenerator[T]:
        async with self._transport.stream(stream.request()) as reply:
            if reply.status >= 400:
                body = b"".join([piece async for piece in reply.pieces])
                raise refusal(HttpReply(reply.status, reply.headers, body))
            stream.begin(reply.status, reply.headers)
            async for piece in reply.pieces:
                for item in stream.feed(piece):
                    yield item
                if stream.is_over:
                    return
            for item in stream.end():
                yield item
