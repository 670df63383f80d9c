"""Make job orders from requests, and remove the server's paths from what clients see."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchmill.config import ProjectEntry
from batchmill.errors import Forbidden, InvalidInput
from batchmill.object_store.urls import SHOWN_CHARS, is_object_url
from batchmill.services.caller_objects import CallerObjects, shown_to_callers
from batchmill.services.files.records import FileRecord
from batchmill.services.path_redaction import PathRedactor
from batchmill.services.project_jobs import NO_RESULTS, ResultIds
from batchmill.services.services import Services
from batchmill.types import (
    Caller,
    DatasetSpec,
    JobOrder,
    JobView,
    LedgerReport,
    ModelSpec,
    Once,
    OutputSchema,
    Policy,
    PromptTemplate,
    RemoteJob,
    ReplyRules,
    SchemaVersion,
    Scope,
    Wait,
)
from batchmill.wire.bundles import ModelVersion
from batchmill.wire.input_urls import file_name, is_hub_url, is_input_url, is_web_url
from batchmill.wire.media import media_columns
from batchmill.wire.native import FILES_MAX, FileInfo, NewJob, SealReport, Work
from batchmill.wire.sampling import sample_of

FRONTEND = "native"


class Redactor:
    """Removes paths of the server, whose files are in `data_dir`, from what clients see."""

    def __init__(self, data_dir: Path) -> None:
        self.text = PathRedactor(data_dir).hide

    def job(self, view: JobView, results: ResultIds = NO_RESULTS) -> JobView:
        """Return a job for clients. `input`, `output` and `errors_output` are ids of files; `origin` is shortened."""
        origin = view.origin or {}
        return replace(
            view,
            input=[_public_name(path, origin) for path in view.input],
            output=results.output or _named_object(view.output, origin),
            errors_output=results.errors or _named_object(view.errors_output, origin),
            origin=_public_origin(origin),
            schema=_public_schema(view.schema),
            message=self.text(view.message),
            notes=[self.text(note) for note in view.notes],
            routing=[self.text(sentence) for sentence in view.routing],
            problems=[
                replace(each, path=_public_name(each.path, origin), message=self.text(each.message))
                for each in view.problems
            ],
            error_samples={code: self.text(sample) for code, sample in view.error_samples.items()},
        )

    def version(self, version: ModelVersion) -> ModelVersion:
        """Remove paths from a version's error, which may be a traceback."""
        return version if version.error is None else replace(version, error=self.text(version.error))

    def wait(self, wait: Wait) -> Wait:
        return replace(wait, reasons=[self.text(reason) for reason in wait.reasons])

    def remote(self, job: RemoteJob) -> RemoteJob:
        return replace(job, message=self.text(job.message))

    def ledger(self, report: LedgerReport) -> LedgerReport:
        return replace(
            report,
            damaged=[self.text(each) for each in report.damaged],
            broken=[self.text(each) for each in report.broken],
        )

    def report(self, report: SealReport) -> SealReport:
        """Return the report of a validation. Its paths are ids of files, or URLs of objects that the caller named."""
        seal = report.seal
        own = {"frontend": FRONTEND}
        return replace(
            report,
            seal=replace(
                seal,
                files=[replace(each, path=_public_name(each.path, own)) for each in seal.files],
                sources=[replace(each, path=_public_name(each.path, own)) for each in seal.sources],
            ),
            problems=[
                replace(each, path=_public_name(each.path, own), message=self.text(each.message))
                for each in report.problems
            ],
        )


def _public_name(path: str, origin: dict) -> str:
    """The URL of an input that an order of this API named; else the last part, which is a file's id."""
    return path if is_input_url(path) and origin.get("frontend") == FRONTEND else Path(path).name


def _named_object(path: str | None, origin: dict) -> str | None:
    """The URL of results that an order of this API named."""
    is_named = path is not None and is_object_url(path) and origin.get("frontend") == FRONTEND
    return path if is_named else None


def _public_schema(schema: OutputSchema | None) -> OutputSchema | None:
    """Without the places of its code."""
    if schema is None or not schema.validator:
        return schema
    version = None if schema.version is None else SchemaVersion(schema.version.reference)
    return replace(schema, validator=Path(schema.validator).name, version=version)


def _public_origin(origin: dict) -> dict:
    """Return the frontend of a job, and for a job of this API the names of its files."""
    return {
        name: origin[name] for name in ("frontend", "files") if name in origin and origin["frontend"] == FRONTEND
    } or {"frontend": origin.get("frontend", "cli")}


def file_info(record: FileRecord) -> FileInfo:
    return FileInfo(
        id=record.id, filename=record.filename, purpose=record.purpose, bytes=record.bytes, created=record.created,
        expires=record.expires, job=record.job,
    )  # fmt: skip


READABLE = ("batch", "batch_output")  # purposes of files that may be inputs; results are rows too
FORMATS = {".csv": "csv", ".parquet": "parquet"}
CODECS = (".gz", ".zst")


class Inputs(Struct, frozen=True):
    """What an order reads. `paths` and `names` are in the order in which it names them."""

    paths: list[str]
    names: dict[str, str]  # id of a file -> the name under which it was uploaded; URL -> itself


class Orders:
    """Makes orders.

    Raises: UnknownName for a file or model of another project; Forbidden for an object of others; InvalidInput.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._objects = CallerObjects(services.config.projects)

    @contextlib.asynccontextmanager
    async def inputs(self, caller: Caller, work: Work) -> AsyncIterator[Inputs]:
        """Find the inputs of an order, and hold its files, so that they are not deleted before it is stored.

        Raises: Unavailable where the object store does not answer, or refuses the server's credentials.
        """
        repeated = [file_id for at, file_id in enumerate(work.files) if file_id in work.files[:at]]
        if repeated:
            raise InvalidInput(f"the file {repeated[0]!r} is named twice", code="duplicate_file")
        output = work.output if isinstance(work, NewJob) else None
        self._objects.check(caller.project, work.files, output)
        paths: list[str] = []
        names: dict[str, str] = {}
        async with contextlib.AsyncExitStack() as stack:
            for each in work.files:
                if is_hub_url(each):
                    raise InvalidInput(
                        f"{each[:SHOWN_CHARS]!r}: only commands read hf:// URLs, with the login of their user: "
                        "upload the file, or name its https:// URL",
                        code="url_not_allowed",
                    )
                if is_web_url(each):
                    paths.append(each)
                    names[each] = each
                elif is_object_url(each):
                    urls = await self._objects.find(caller.project, each)
                    paths += urls
                    names |= dict(zip(urls, urls, strict=True))
                else:
                    record = await stack.enter_async_context(self._services.files.hold(caller.project, each))
                    _check_purpose(record)
                    paths.append(str(self._services.files.path(record)))
                    names[record.id] = record.filename
                if len(paths) > FILES_MAX:
                    raise InvalidInput(f"the inputs match more than {FILES_MAX:,} files", code="too_many_files")
            if len(names) < len(paths):
                raise InvalidInput("two of the inputs match the same object", code="duplicate_file")
            if output is not None or any(map(is_input_url, paths)):
                if isinstance(work, NewJob):
                    await stack.enter_async_context(self._objects.using(caller.project))
                else:  # a preview has a slot of its own, and reads every row
                    stack.enter_context(shown_to_callers(caller.project))
            yield Inputs(paths, names)

    def work(self, caller: Caller, work: Work, inputs: Inputs) -> JobOrder:
        """Return an order without the settings that only a job has."""
        config = self._services.config
        models = self._models(caller, work)
        self._check_template(caller, work)
        if not work.models and (
            work.prompt is not None or work.template is not None or self._format(work, inputs) in ("csv", "parquet")
        ):
            raise InvalidInput(
                "the rows of a table name no model: set `models` to one of "
                f"{', '.join(model.name for model in models) or 'none, because this key may use no model'}",
                code="no_model",
            )
        media = media_columns(work.image_columns, work.audio_columns, work.document_columns)
        return JobOrder(
            dataset=DatasetSpec(
                inputs.paths,
                format=self._format(work, inputs),
                private_hosts=config.server.private_hosts if media or any(map(is_web_url, inputs.paths)) else [],
                **msgspec.structs.asdict(config.limits),
            ),
            models=models,
            prompt=work.prompt,
            system=work.system,
            media=media,
            template=None if work.template is None else PromptTemplate(work.template),
            url=work.url,
            params=work.params,
            schema=self._schema(caller, work),
            model_column=work.model_column,
            adapter_column=work.adapter_column,
            sample=sample_of(work.limit, work.sample, work.seed),
            constant_prompt=work.allow_constant_prompt,
            policy=Policy(
                on_invalid=work.on_invalid,
                dedupe=work.dedupe,
                reuse=reuse_of(work.reuse),
                deadline=self._check_deadline(work.deadline),
                on_engine_failure="fail",
            ),
            rows_max=config.server.rows_max,
            default_model=bool(work.models),
            project=caller.project,
        )

    def job(self, caller: Caller, job: NewJob, inputs: Inputs, once: Once) -> JobOrder:
        """Return the order of a job."""
        base = self.work(caller, job, inputs)
        policy = Policy(
            on_invalid=job.on_invalid,
            dedupe=job.dedupe,
            reuse=base.policy.reuse,
            budget=job.budget,
            priority=job.priority,
            deadline=self._deadline(job),
            on_engine_failure="fail",
        )
        origin = {
            "frontend": FRONTEND,
            "input_file_ids": list(inputs.names),
            "files": inputs.names,
            "key": caller.key,
        }
        if job.output is not None and not job.output.endswith("/") and job.output_format is not None:
            raise InvalidInput(
                f"the name of the output {job.output!r} says its format: leave out output_format", code="invalid_output"
            )
        fields = {
            "policy": policy, "replies": ReplyRules(list(job.fail_on)), "labels": job.labels,
            "output_format": job.output_format or "jsonl",
            "together": job.together, "output": job.output, "part_rows": job.part_rows, "overwrite": job.overwrite,
        }  # fmt: skip
        return replace(base, origin=origin, once=once, **fields)

    def _deadline(self, job: NewJob) -> float | None:
        now = self._services.clock.now()
        if job.deadline is not None and job.completion_s is not None:
            raise InvalidInput("deadline and completion_s both set the deadline: leave one of them out")
        return self._check_deadline(job.deadline) if job.completion_s is None else now + job.completion_s

    def _check_deadline(self, deadline: float | None) -> float | None:
        if deadline is not None and deadline <= self._services.clock.now():
            raise InvalidInput("the deadline is in the past", code="invalid_deadline")
        return deadline

    def _models(self, caller: Caller, work: Work) -> list[ModelSpec]:
        """Return the named models, with the names that the caller's rows may use; if none is named, all models."""
        directory = self._services.directory
        chosen: list[ModelSpec] = []
        for name in work.models:
            served = directory.find(caller, name)
            if served.adapter is not None:
                raise InvalidInput(
                    f"{name!r} is an adapter of {served.model.name!r}: name that model, and let rows name the adapter "
                    '(or with a prompt, params: {"model": "' + name + '"})',
                    code="adapter_as_model",
                )
            spec = directory.for_job(caller, name)
            if spec in chosen:
                raise InvalidInput(f"the model {name!r} is named twice", code="duplicate_model")
            chosen.append(spec)
        return directory.each_once(caller, chosen) if chosen else directory.specs(caller)

    def _check_template(self, caller: Caller, work: Work) -> None:
        """Raises: Forbidden: a template is code, though it runs in a sandbox."""
        project = self._services.config.projects.get(caller.project, ProjectEntry())
        if work.template is not None and not (caller.may(Scope.DEPLOY) or project.templates):
            raise Forbidden(
                "this key may send no template: use `prompt`, a key with the scope deploy, or ask the operator to set "
                f"projects.{caller.project}.templates",
                code="template_not_allowed",
            )

    def _schema(self, caller: Caller, work: Work) -> OutputSchema | None:
        if work.validator is None:
            return _schema_of(work)
        if work.schema is not None:
            raise InvalidInput(
                f"the class {work.validator!r} has a schema of its own: leave out `schema` or `validator`",
                code="schema_conflict",
            )
        found = self._services.versions.schema_class(caller, work.validator)
        return replace(found, attempts=work.schema_attempts, prefix=work.field_prefix)

    @staticmethod
    def _format(work: Work, inputs: Inputs) -> str | None:
        """Return the format of the files, by the names under which they were uploaded."""
        if work.format is not None:
            return work.format
        formats = {_format_of(file_name(name) if is_input_url(name) else name) for name in inputs.names.values()}
        if len(formats) > 1:
            names = ", ".join(list(inputs.names.values())[:10])
            raise InvalidInput(f"the files of a dataset must have one format: {names}", code="format_mismatch")
        # Without `models`, JSON lines must be OpenAI rows, because only those name a model.
        return formats.pop() or (None if work.models else "openai")


def _check_purpose(record: FileRecord) -> None:
    if record.purpose not in READABLE:
        raise InvalidInput(
            f"the file {record.id} has the purpose {record.purpose!r}: an input needs the purpose "
            f"{' or '.join(READABLE)}",
            code="wrong_purpose",
        )


def _format_of(filename: str) -> str | None:
    """Return csv or parquet; None for JSON lines, whose first row decides between the two formats."""
    suffixes = [suffix.lower() for suffix in Path(filename).suffixes]
    if suffixes and suffixes[-1] in CODECS:
        suffixes.pop()
    return FORMATS.get(suffixes[-1]) if suffixes else None


def reuse_of(wanted: bool | None) -> str | None:
    """Which rows may take over earlier results, as `Policy.reuse` says it."""
    return None if wanted is None else "all" if wanted else "none"


def _schema_of(work: Work) -> OutputSchema | None:
    if work.schema is not None:
        try:
            document = msgspec.json.encode(work.schema).decode()
        except (OverflowError, RecursionError) as error:
            raise InvalidInput(f"the schema cannot be stored: {error}", code="invalid_schema") from None
        return OutputSchema(document, work.schema_attempts, work.field_prefix)
    if work.field_prefix:
        raise InvalidInput("field_prefix has no effect without a schema", code="needless_schema")
    return None
