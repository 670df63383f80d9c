"""The order of a job in process: the keywords of `batchmill.run`, which are those of a server's job and of a model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import fields, replace

from batchmill.cli.jobs.order_options import absolute_output, described_model, input_files, output_files, reuse_of
from batchmill.cli.local import LocalApp
from batchmill.client.inputs import HowOptions, RowOptions, described
from batchmill.config import Config
from batchmill.errors import InvalidInput
from batchmill.executors.validators.classes import with_class
from batchmill.inprocess.functions import FunctionFiles
from batchmill.jobs.intake.fetching import detect_format
from batchmill.models.registry import ModelFlags, checked_budget
from batchmill.types import DatasetSpec, JobOrder, ModelSpec, OutputSchema, Policy, PromptTemplate, ReplyRules
from batchmill.wire.input_urls import is_web_url
from batchmill.wire.media import media_columns
from batchmill.wire.native import Name, NewJob
from batchmill.wire.sampling import sample_of
from batchmill.wire.schemas.class_schemas import has_validators, schema_of
from batchmill.wire.schemas.output_schema import needless_schema

Model = str | Callable[..., Any] | type
FLAGS = {each.name for each in fields(ModelFlags)}
MODELS = ("model", "models")


class Switches(Struct, frozen=True):
    """Keywords of the order alone."""

    restart: bool = False
    copy: bool = False


SWITCHES = {each.name for each in fields(Switches)}


class RunOptions(RowOptions, HowOptions, total=False):
    """The keywords of `batchmill.run`: those of `Client.run`, and what only a job in process has."""

    models: Sequence[Model]  # the first is for rows that name none
    restart: bool  # start over although an unfinished job exists
    copy: bool  # keep a copy of the input with the job
    executor: Literal["ray"]  # where workers run, instead of cluster.executor
    adapters: dict[Name, str]  # LoRA adapters: name -> folder or id of a model hub
    engine_args: dict[str, str | int | float | bool]  # flags of the engine
    base_url: str  # of an OpenAI-compatible service
    api_key: str  # "env:NAME", "file:PATH" or "secret:NAME"
    python: str  # the interpreter of the engine
    workers: int  # worker processes, or engine replicas
    gpus: int  # of each worker, its own
    requests_per_minute: int
    tokens_per_minute: int
    in_flight_max: int  # concurrent rows of each worker
    attempt_timeout_s: float  # of one call


class Keywords(Struct, frozen=True):
    """The keywords of a job, checked."""

    job: NewJob
    models: list[Model]
    flags: ModelFlags
    validator: type | None = None  # the class of the schema, if its code validates
    switches: Switches = Switches()

    @property
    def output(self) -> str | None:
        return self.job.output


def checked(options: Mapping[str, Any]) -> Keywords:
    """Raises: InvalidInput for a keyword that is unknown or has a value that it cannot have."""
    given = dict(options)
    models = _models(given)
    try:
        flags = msgspec.convert({name: given.pop(name) for name in FLAGS & given.keys()}, ModelFlags)
        switches = msgspec.convert({name: given.pop(name) for name in SWITCHES & given.keys()}, Switches)
    except msgspec.ValidationError as error:
        raise InvalidInput(str(error), code="invalid_field") from None
    if "output" in given:
        given["output"] = path_of("output", given["output"])
    validator = None
    if isinstance(source := given.get("schema"), type):
        given["schema"] = schema_of(source)
        validator = source if has_validators(source) else None
    job = described(NewJob, ["checked"], given, others=sorted({*FLAGS, *SWITCHES, "executor"}))
    if job.deadline is not None and job.completion_s is not None:
        raise InvalidInput("deadline and completion_s both set the deadline: leave one of them out")
    return Keywords(job, models, flags, validator, switches)


def path_of(name: str, value: Any) -> str | None:
    """A keyword that is a path, or None. Raises: InvalidInput."""
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not isinstance(path := os.fspath(value), str):
        raise InvalidInput(f"{name} is a path, not a {type(value).__name__}", code="invalid_field")
    if not path:
        raise InvalidInput(f"{name} is empty: give a path, or leave it out", code="invalid_field")
    return path


def _models(given: dict[str, Any]) -> list[Model]:
    model, models = given.pop("model", None), given.pop("models", None)
    if model is not None and models is not None:
        raise InvalidInput("model and models are two names of one thing: leave one out")
    if models is not None and not isinstance(models, list | tuple):
        raise InvalidInput(f"models is a list of models, not {models!r}")
    named: list[Model] = [model] if model is not None else list(models or ())
    if not named or "" in named:
        raise InvalidInput(
            "name a model: model='NAME' of the configuration, 'ENGINE:SOURCE', or a function", code="no_model"
        )
    for each in named:
        if not isinstance(each, str) and not callable(each):
            raise InvalidInput(f"a model is a name or a function, not a {type(each).__name__}", code="invalid_model")
    return named


async def make_order(
    app: LocalApp, config: Config, cwd: Path, paths: Sequence[str], keywords: Keywords, *, is_spooled: bool
) -> JobOrder:
    """Args: paths: files, folders, globs and URLs; of data in memory, the file that it was spooled to.

    Raises: InvalidInput.
    """
    job = keywords.job
    output = None if job.output is None else absolute_output(cwd, job.output)
    leave_out = [] if output is None else output_files(output)
    files = (
        list(paths)
        if is_spooled
        else input_files([str(cwd / path) if _is_plain(path) else path for path in paths], leave_out, is_local=True)
    )
    models = await _resolved(app, config, cwd, keywords)
    media = media_columns(job.image_columns, job.audio_columns, job.document_columns)
    dataset = DatasetSpec(
        paths=files,
        format=job.format,
        copy=keywords.switches.copy,
        private_hosts=config.server.private_hosts if media or any(map(is_web_url, files)) else [],
        media_folder=(str(cwd) if is_spooled else "") if media else None,
        **msgspec.structs.asdict(config.limits),
    )
    return JobOrder(
        dataset=dataset,
        models=models,
        prompt=job.prompt,
        system=job.system,
        media=media,
        template=None if job.template is None else PromptTemplate(job.template),
        model_column=job.model_column,
        adapter_column=job.adapter_column,
        constant_prompt=job.allow_constant_prompt,
        url=job.url,
        params=job.params,
        schema=await _schema_of(app, config, keywords, models),
        policy=Policy(
            on_invalid=job.on_invalid,
            dedupe=job.dedupe,
            reuse=reuse_of(job.reuse, is_update=False),
            budget=checked_budget(job.budget, models),
            priority=job.priority,
            deadline=job.deadline if job.completion_s is None else time.time() + job.completion_s,
        ),
        output=output,
        part_rows=job.part_rows,
        output_format=_output_format(job, dataset, output),
        replies=ReplyRules(list(job.fail_on)),
        together=job.together,
        labels=job.labels,
        sample=sample_of(job.limit, job.sample, job.seed),
        restart=keywords.switches.restart,
        overwrite=job.overwrite,
    )


def _is_plain(path: str) -> bool:
    return "://" not in path


def _output_format(job: NewJob, dataset: DatasetSpec, output: str | None) -> str:
    """Results of a table that stay with their job are Parquet, which keeps the types of columns, where pyarrow is."""
    if job.output_format is not None:
        return job.output_format
    is_table = output is None and detect_format(dataset) != "openai"
    return "parquet" if is_table and find_spec("pyarrow") is not None else "jsonl"


async def _schema_of(
    app: LocalApp, config: Config, keywords: Keywords, models: Sequence[ModelSpec]
) -> OutputSchema | None:
    job = keywords.job
    if (job.validator or job.schema) is not None and models and all(model.takes_columns for model in models):
        raise needless_schema()  # before its class is loaded
    if job.validator is not None:
        if job.schema is not None:
            raise InvalidInput("the class of `validator` has a schema: leave `schema` out", code="schema_conflict")
        found = await app.deployed_schema(config, job.validator)
        return replace(found, attempts=job.schema_attempts, prefix=job.field_prefix)
    if job.schema is None:
        if job.field_prefix:
            raise InvalidInput("field_prefix has no effect without a schema", code="needless_schema")
        return None
    try:
        document = msgspec.json.encode(job.schema).decode()
    except (OverflowError, RecursionError, TypeError) as error:
        raise InvalidInput(f"the schema cannot be stored: {error}", code="invalid_schema") from None
    schema = OutputSchema(document, job.schema_attempts, job.field_prefix)
    if keywords.validator is None:
        return schema
    source = FunctionFiles(config.data_dir).source_of(keywords.validator)
    return await with_class(source, schema)


async def _resolved(app: LocalApp, config: Config, cwd: Path, keywords: Keywords) -> list[ModelSpec]:
    if len(keywords.models) > 1 and keywords.flags != ModelFlags():
        given = [name for name in sorted(FLAGS) if getattr(keywords.flags, name) != getattr(ModelFlags(), name)]
        raise InvalidInput(f"{given[0]} describes one model: with several, describe each in the configuration")
    functions = FunctionFiles(config.data_dir)
    models: list[ModelSpec] = []
    for each in keywords.models:
        if isinstance(each, str):
            spec = await described_model(app, config, cwd, each, keywords.flags)
        else:
            source = functions.source_of(each)
            spec = await described_model(app, config, cwd, f"function:{source}", keywords.flags)
        if spec.name in [other.name for other in models]:
            raise InvalidInput(f"two models are called {spec.name!r}: rename one, or name them in the configuration")
        models.append(spec)
    return models
