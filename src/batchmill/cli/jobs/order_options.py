"""The options of an order, shared by `run`, `validate`, `plan` and `estimate`, and the order that they make."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import msgspec
from msgspec.structs import replace

from batchmill.cli.session import App, Session, global_options, refuse_non_utf8
from batchmill.cli.values import COUNT, POSITIVE, Moment
from batchmill.client.bundling import bundled
from batchmill.client.schema_classes import check_models, reference_of, refused, settings_of
from batchmill.config import Config
from batchmill.datasets import formats
from batchmill.datasets.spooled_inputs import FOLDER as SPOOLED
from batchmill.errors import Forbidden, InvalidInput
from batchmill.executors.validators.classes import class_schema, is_class
from batchmill.jobs.intake.fetching import find_in_hub
from batchmill.jobs.ledger.files import is_folder
from batchmill.jobs.results.results import errors_of
from batchmill.models.registry import KINDS, ModelFlags, checked_budget, resolve
from batchmill.object_store.urls import is_object_url
from batchmill.types import DatasetSpec, JobOrder, ModelSpec, OutputSchema, Policy, PromptTemplate, ReplyRules
from batchmill.types.machines import GPUS_MAX
from batchmill.wire.input_urls import is_hub_url, is_input_url, is_web_url
from batchmill.wire.json_bytes import is_too_deep
from batchmill.wire.media import KINDS as MEDIA_KINDS
from batchmill.wire.media import media_columns
from batchmill.wire.sampling import SEED, SEED_MAX, sample_of
from batchmill.wire.schemas.output_schema import SCHEMA_ATTEMPTS_MAX, needless_schema, one_line, schema_of_fields

TEMPLATE_BYTES_MAX = 1024 * 1024  # of a file with a template
PROMPT_FIELDS = ("messages", "prompt", "input", "instructions")  # fields of a body that --prompt and --system fill


def pairs(texts: Sequence[str], flag: str, bare: str | None = None) -> dict[str, str]:
    """Parse KEY=VALUE texts. `bare` is the value of a KEY alone; None: a value is required."""
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or (not equals and bare is None):
            raise InvalidInput(f"{flag} is given as KEY=VALUE, not {text!r}")
        if name in values:
            raise InvalidInput(f"{flag} {name} is given twice")
        values[name] = value if equals else str(bare)
    return values


def scalar(text: str) -> str | int | float | bool:
    """Parse the value of a flag to a type of the configuration."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        # "007", "1_000", "inf" and "1.50" stay text: a flag must reach the engine unchanged.
        return value if math.isfinite(value) and str(value) == text else text
    return text


def request_fields(texts: Sequence[str], depth_max: int, flag: str = "--param") -> dict[str, Any]:
    """Parse --param, or another flag: further fields of every request. A value is JSON, or text if it is not JSON."""
    fields: dict[str, Any] = {}
    for name, text in pairs(texts, flag).items():
        if name in PROMPT_FIELDS:
            raise InvalidInput(f"{flag} cannot set {name}: use --prompt and --system")
        if is_too_deep(text.encode(errors="replace"), depth_max):
            raise InvalidInput(f"{flag} {name} is nested deeper than {depth_max} levels")
        try:
            fields[name] = json.loads(text, parse_constant=_refuse_number, parse_float=_finite)
        except ValueError:
            fields[name] = text
        except _NotFinite as error:
            raise InvalidInput(f"{flag} {name} holds {error}, which is not a JSON number") from None
    return fields


class _NotFinite(Exception):
    """A number that JSON cannot express: the service would get null."""


def _refuse_number(name: str) -> NoReturn:
    raise _NotFinite(name)


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


C = TypeVar("C", bound=Callable[..., Any])
deadline_option = click.option(
    "--deadline", type=Moment(), metavar="WHEN", help="End at this time with the finished rows: 12h, 2026-12-31T18:00."
)

ORDER_OPTIONS = (
    click.argument("inputs", metavar="INPUT...", nargs=-1, required=True),
    click.option("--model", "models", metavar="NAME", multiple=True, required=True,
                 help="A configured model, or ENGINE:SOURCE. Of several, the first is the default."),
    click.option("-o", "--output", metavar="FILE",
                 help="The results file: .jsonl, .csv or .parquet; a folder; or -, which is standard output."),
    click.option("--format", "format_", type=click.Choice(["openai", "jsonl", "csv", "parquet"]),
                 help="The input format [detected]."),
    click.option("--prompt", metavar="TEXT|@FILE",
                 help="The prompt template for rows of a table; {column} inserts a cell. @@ is a literal @."),
    click.option("--template", metavar="FILE",
                 help="A template of Jinja2 for the prompt, in the place of --prompt; {{ column }} inserts a cell."),
    click.option("--system", metavar="TEXT|@FILE", help="The template of the system prompt."),
    click.option("--image", "image_columns", metavar="COLUMN", multiple=True,
                 help="A column of images beside the prompt: paths, URLs, or bytes of Parquet."),
    click.option("--audio", "audio_columns", metavar="COLUMN", multiple=True, help="The same for recordings."),
    click.option("--document", "document_columns", metavar="COLUMN", multiple=True, help="The same for PDF documents."),
    click.option("--model-column", metavar="NAME", help="The column that names the model of each row of a table."),
    click.option("--adapter-column", metavar="NAME", help="The column that names the adapter of each row."),
    click.option("--allow-constant-prompt", is_flag=True, help="The prompt may name no column."),
    click.option("--url", metavar="PATH", help="The path for prompts [/v1/chat/completions]."),
    click.option("--param", "params", metavar="KEY=VALUE", multiple=True,
                 help="An additional field of each request; VALUE is JSON or text."),
    click.option("--schema", metavar="FILE",
                 help="A JSON Schema, or FILE.py:CLASS: answers that do not fit are asked for again."),
    click.option("--fields", metavar="TEXT",
                 help='The same for an object: "label: yes|no, score: float, tags: [str], why?: str".'),
    click.option("--validator", metavar="NAME[@VERSION]",
                 help="In the place of --schema: a class that was deployed with `deploy --schema`."),
    click.option("--schema-requirements", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
                 help="Packages that the class of --schema needs: it runs in an environment of its own."),
    click.option("--schema-attempts", type=click.IntRange(0, SCHEMA_ATTEMPTS_MAX), metavar="N",
                 help="Ask for an answer again at most N times [2]."),
    click.option("--field-prefix", metavar="TEXT", help="Put TEXT before the columns that the fields become."),
    click.option("--on-invalid", type=click.Choice(["fail", "skip"]), default="fail", show_default=True,
                 help="With invalid rows: run nothing, or record errors for them."),
    click.option("--dedupe", is_flag=True, help="Run identical requests once, even if their results may vary."),
    click.option("--reuse/--no-reuse", default=None,
                 help="Take over results of earlier jobs with the same requests and models [as the project says]."),
    click.option("--copy", is_flag=True, help="Keep a copy of the input with the job."),
    click.option("--adapter", "adapters", metavar="NAME=PATH", multiple=True, help="A LoRA adapter for rows."),
    click.option("--base-url", metavar="URL", help="The address of an OpenAI-compatible service."),
    click.option("--engine-arg", "engine_args", metavar="KEY=VALUE", multiple=True, help="A flag of the engine."),
    click.option("--python", metavar="FILE", help="The Python interpreter of the engine."),
    click.option("--workers", "--replicas", "workers", type=COUNT, help="Worker processes, or engine replicas."),
    click.option("--gpus", type=click.IntRange(0, GPUS_MAX), metavar="N", help="GPUs of each worker, its own."),
    click.option("--rpm", type=COUNT, help="The most requests per minute."),
    click.option("--tpm", type=COUNT, help="The most tokens per minute."),
    click.option("--in-flight", type=COUNT, help="The most concurrent rows of each worker."),
    click.option("--timeout", type=POSITIVE, metavar="S", help="Time limit of one call, in seconds."),
)  # fmt: skip


SAMPLE_OPTIONS = (
    click.option("--limit", type=COUNT, metavar="N", help="Only the first N rows; `run` then pauses the job."),
    click.option("--sample", type=COUNT, metavar="N", help="Only N rows that are drawn at random."),
    click.option("--seed", type=click.IntRange(0, SEED_MAX), metavar="N",
                 help=f"Draw other rows, the same each time [{SEED}]."),
)  # fmt: skip


def sample_options(command: C) -> C:
    """Add the options that select some of the rows."""
    for option in reversed(SAMPLE_OPTIONS):
        command = option(command)
    return command


def order_options(command: C) -> C:
    """Add the options of ORDER_OPTIONS and the global ones."""
    command = global_options(command)
    for option in reversed(ORDER_OPTIONS):
        command = option(command)
    return command


def reuse_of(flag: bool | None, *, is_update: bool) -> str | None:
    """Which rows may take over earlier results, as `Policy.reuse` says it. Raises: InvalidInput."""
    if is_update and flag is False:
        raise InvalidInput("--update takes results over: leave out --no-reuse, or run all rows with --overwrite")
    return "all" if flag or is_update else None if flag is None else "none"


def _update(options: dict[str, Any], output: str | None) -> bool:
    """Raises: InvalidInput for --update without anything to update."""
    if not options.get("update", False):
        return False
    if output is None:
        raise InvalidInput("--update writes finished results anew: name them with -o FILE")
    if options.get("overwrite"):
        raise InvalidInput("--update takes over what --overwrite runs again: leave one of both out")
    return True


def order_for_update(order: JobOrder) -> JobOrder:
    """The order as --update changes it."""
    return msgspec.structs.replace(
        order, update=True, policy=msgspec.structs.replace(order.policy, reuse=order.policy.reuse or "all")
    )


def input_files(patterns: list[str], leave_out: list[str], *, is_local: bool) -> list[str]:
    """The files of an order. A server reads URLs itself: this machine needs no credentials of a store."""
    urls = [] if is_local else [each for each in patterns if is_input_url(each)]
    hub = [each for each in patterns if each not in urls and is_hub_url(each)]
    local = [each for each in patterns if each not in urls and each not in hub]
    found = formats.resolve(local, leave_out) if local or not (urls or hub) else []
    if hub:
        found = sorted({*found, *(url for pattern in hub for url in find_in_hub(pattern, leave_out))})
    return [*found, *urls]


async def build_order(session: Session, config: Config, options: dict[str, Any]) -> JobOrder:
    """Build the order from the options of a command line. Raises: InvalidInput."""
    is_local = session.server_url is None
    models = await _models(session, config, options) if is_local else named_models(session, options)
    output = options["output"]
    if output is not None:
        output = absolute_output(session.cwd, output)
    media = media_columns(*(options[f"{kind}_columns"] for kind in MEDIA_KINDS))
    order = JobOrder(
        dataset=DatasetSpec(
            paths=input_files(
                list(options["inputs"]), [] if output is None else output_files(output), is_local=is_local
            ),
            format=options["format_"],
            copy=options["copy"],
            private_hosts=config.server.private_hosts if media or any(map(is_web_url, options["inputs"])) else [],
            media_folder=media_folder(options["inputs"], session.cwd) if is_local and media else None,
            **msgspec.structs.asdict(config.limits),
        ),
        models=models,
        prompt=_template("--prompt", options["prompt"], session.cwd),
        system=_template("--system", options["system"], session.cwd),
        template=_template_file(options["template"], session.cwd),
        media=media,
        model_column=options["model_column"],
        adapter_column=options["adapter_column"],
        constant_prompt=options["allow_constant_prompt"],
        sample=sample_of(options.get("limit"), options.get("sample"), options.get("seed")),
        url=options["url"],
        params=request_fields(options["params"], config.limits.depth_max),
        schema=await output_schema(session, config, options, models),
        policy=Policy(
            on_invalid=options["on_invalid"],
            dedupe=options["dedupe"],
            reuse=reuse_of(options["reuse"], is_update=options.get("update", False)),
            budget=checked_budget(options.get("budget"), models) if is_local else options.get("budget"),
            priority=options.get("priority", 0),
            deadline=options.get("deadline"),
        ),
        output=output,
        part_rows=options.get("part_rows"),
        output_format=options.get("output_format") or "jsonl",
        replies=ReplyRules(options.get("fail_on") or []),
        together=options.get("together", False),
        labels=pairs(options.get("labels", ()), "--label"),
        restart=options.get("restart", False),
        overwrite=options.get("overwrite", False),
        update=_update(options, output),
    )
    _refuse_non_utf8_order(order)
    return order


def media_folder(inputs: Sequence[str], cwd: Path) -> str:
    """What relative paths in cells are relative to: the folder of each file (""), or for data without one `cwd`."""
    is_spooled = any(os.path.basename(os.path.dirname(path)) == SPOOLED for path in inputs)
    return str(cwd) if is_spooled else ""


async def output_schema(
    session: Session, config: Config, options: dict[str, Any], models: Sequence[ModelSpec]
) -> OutputSchema | None:
    """The schema of --schema, --fields or --validator. Raises: InvalidInput."""
    cwd, path, fields, validator = session.cwd, options["schema"], options["fields"], options["validator"]
    attempts, prefix, requirements = (
        options[name] for name in ("schema_attempts", "field_prefix", "schema_requirements")
    )
    given = [each for each in (path, fields, validator) if each is not None]
    if not given:
        flags = {"--schema-attempts": attempts, "--field-prefix": prefix, "--schema-requirements": requirements}
        for flag, value in flags.items():
            if value is not None:
                raise InvalidInput(f"{flag} has no effect without --schema, --fields or --validator")
        return None
    if len(given) > 1:
        raise InvalidInput("--schema, --fields and --validator say the same: give one of them")
    if session.server_url is None and models and all(model.takes_columns for model in models):
        raise needless_schema()  # before the class is loaded, or deployed
    attempts = 2 if attempts is None else attempts
    is_of_class = path is not None and is_class(path) and not (cwd / path).exists()
    if requirements is not None:
        if not is_of_class:
            raise InvalidInput("--schema-requirements is for a class: give --schema FILE.py:CLASS with it")
        validator = await _deployed(session, config, path, cwd / Path(requirements), models)
    if validator is not None:
        found = await session.app.deployed_schema(config, validator)
        return replace(found, attempts=attempts, prefix=prefix or "")
    if fields is not None:
        document = json.dumps(schema_of_fields(fields))
    elif is_of_class:
        return await _class_of(path, cwd, OutputSchema("", attempts, prefix or ""))
    else:
        try:
            document = (cwd / Path(path).expanduser()).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"the schema {path} cannot be read: {error}") from None
        document = one_line(document, path)
    return OutputSchema(document, attempts, prefix or "")


async def _class_of(path: str, cwd: Path, schema: OutputSchema) -> OutputSchema:
    """The schema of a class that is loaded with batchmill's Python. Raises: InvalidInput."""
    try:
        return await class_schema(path, cwd, schema)
    except InvalidInput as error:
        if "No module named" not in error.message:
            raise
        way_out = (
            "a package that the class needs is missing: name it in --schema-requirements FILE"  # before what is cut
        )
        raise InvalidInput(f"{way_out}; {error.message}", code=error.code) from None


async def _deployed(
    session: Session, config: Config, path: str, requirements: Path, models: Sequence[ModelSpec]
) -> str:
    """Deploy a class with its packages, without a name: the same code is the same version. Returns its reference.

    Raises: Forbidden, with the way out; ModelFailed with the traceback.
    """
    try:
        packages = requirements.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{requirements} cannot be read: {error}") from None
    settings = settings_of({"schema_requirements": packages})
    with bundled(path, settings, cwd=session.cwd) as (order, bundle):
        async with session.open() as client:
            if session.server_url is not None and models:
                check_models([model.name for model in models], await client.models())
            try:
                reply = await session.app.deploy(client, config, bundle)
            except Forbidden as error:
                raise refused(order.target, error) from None
    return reference_of(reply.version)


def _template(flag: str, text: str | None, cwd: Path) -> str | None:
    """The text of a template: as given, or that of the file in @FILE; @@ begins a text with @.

    Raises: InvalidInput where the file cannot be read, is empty, too long or no UTF-8.
    """
    if text is None or not text.startswith("@"):
        return text
    if text.startswith("@@"):
        return text[1:]
    way_out = f"{flag} @FILE reads a template from a file; write @@ for a text that begins with @"
    return _file_text(f"{flag} {text}", cwd / Path(text[1:]).expanduser(), f"; {way_out}")


def _template_file(path: str | None, cwd: Path) -> PromptTemplate | None:
    """The template of --template. Raises: InvalidInput, as `_template`."""
    if path is None:
        return None
    return PromptTemplate(_file_text(f"--template {path}", cwd / Path(path).expanduser()), name=path)


def _file_text(what: str, path: Path, way_out: str = "") -> str:
    """The text of a file, without the end of its last line. Raises: InvalidInput, which begins with `what`."""
    try:
        with open(path, "rb") as file:
            data = file.read(TEMPLATE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise InvalidInput(f"{what}: {cause or error}{way_out}", code="invalid_template") from None
    if len(data) > TEMPLATE_BYTES_MAX:
        raise InvalidInput(f"{what}: the file has more than {TEMPLATE_BYTES_MAX:,} bytes", code="invalid_template")
    if not data.strip():
        raise InvalidInput(f"{what}: the file is empty{way_out}", code="invalid_template")
    try:
        return data.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")  # an editor adds the last line's end
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{what}: the file is not UTF-8 text (byte {error.start})", code="invalid_template"
        ) from None


def absolute_output(cwd: Path, output: str) -> str:
    """The output as a job stores it: a folder's ends with a slash."""
    if is_object_url(output):
        return output
    path = os.path.abspath(cwd / Path(output).expanduser())
    return os.path.join(path, "") if output.endswith("/") or os.path.isdir(path) else path


def output_files(output: str) -> list[str]:
    """The files that a job with this output writes: the same command must not read them as input later."""
    if is_folder(output):
        return [output]
    files = [output, errors_of(output)]
    return [*files, *(f"{file}.part" for file in files)]


def _refuse_non_utf8_order(order: JobOrder) -> None:
    """Refuse text that is not UTF-8, from the command line or a file name: a job's description cannot store it."""
    try:
        msgspec.json.encode(order)
    except UnicodeEncodeError as error:
        refuse_non_utf8(error.object)
        raise


async def _models(session: Session, config: Config, options: dict[str, Any]) -> list[ModelSpec]:
    key = session.api_key_env
    args = {name: scalar(value) for name, value in pairs(options["engine_args"], "--engine-arg", bare="true").items()}
    flags = ModelFlags(
        adapters=pairs(options["adapters"], "--adapter"),
        engine_args={name.removeprefix("--"): value for name, value in args.items()},
        base_url=options["base_url"],
        api_key=None if key is None else f"env:{key}",
        python=options["python"],
        workers=options["workers"],
        gpus=options["gpus"],
        requests_per_minute=options["rpm"],
        tokens_per_minute=options["tpm"],
        in_flight_max=options["in_flight"],
        attempt_timeout_s=options["timeout"],
    )
    names = options["models"]
    if len(names) > 1 and flags != ModelFlags():
        raise InvalidInput("flags describe one model: with several --model, describe each in the configuration")
    models = [await described_model(session.app, config, session.cwd, name, flags) for name in names]
    for at, model in enumerate(models):
        if model.name in [other.name for other in models[:at]]:
            raise InvalidInput(f"two models are called {model.name!r}: name them in the configuration")
    return models


async def described_model(app: App, config: Config, cwd: Path, name: str, flags: ModelFlags) -> ModelSpec:
    """As `model_of`, with settings from the command line. Raises: InvalidInput."""
    if name not in config.models and ":" not in name:
        deployed = await app.deployed(config, name)
        if deployed is not None:
            if flags != ModelFlags():
                raise InvalidInput(f"{name} is deployed with its own settings: `batchmill deploy` changes them")
            return deployed
    return await app.adapted(config, resolve(name, config, cwd=cwd, flags=flags))


async def model_of(session: Session, config: Config, name: str) -> ModelSpec:
    """A model of the configuration, a deployed one, or one that its name describes. Raises: InvalidInput."""
    return await described_model(session.app, config, session.cwd, name, ModelFlags())


# Flags that describe a model or this machine: a server has its own models and its own disk.
LOCAL_FLAGS = {
    "adapters": "--adapter", "base_url": "--base-url", "engine_args": "--engine-arg", "python": "--python",
    "workers": "--workers", "gpus": "--gpus", "rpm": "--rpm", "tpm": "--tpm", "in_flight": "--in-flight",
    "timeout": "--timeout", "copy": "--copy",
}  # fmt: skip


def named_models(session: Session, options: dict[str, Any]) -> list[ModelSpec]:
    """The models of a server by name. Raises: InvalidInput for flags that only a configuration may set."""
    for name, flag in LOCAL_FLAGS.items():
        if options[name]:
            raise InvalidInput(f"{flag} has no meaning at a server: the configuration of {session.server_url} sets it")
    if options.get("restart"):
        raise InvalidInput("--restart has no meaning at a server: each `run` there starts a new job")
    names = options["models"]
    for at, name in enumerate(names):
        kind, colon, _ = name.partition(":")
        if colon and (kind in KINDS or kind.endswith(".py")):
            raise InvalidInput(
                f"{name!r} defines a model, but a server runs only its own: `batchmill models` lists them"
            )
        if name in names[:at]:
            raise InvalidInput(f"the model {name!r} is named twice")
    return [ModelSpec(name=name, engine="", source=name) for name in names]
