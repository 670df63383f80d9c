"""`batchmill deploy`: deploys a Python function as a model, on this machine or at a server."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import click

from batchmill.cli.jobs.order_options import pairs
from batchmill.cli.session import EXIT_OK, Session, global_options
from batchmill.cli.text import clean
from batchmill.cli.values import CALL_TIME, COUNT, ByteCount
from batchmill.client.bundling import bundled
from batchmill.errors import InvalidInput
from batchmill.wire.native import DeployReply, VersionInfo

EXAMPLE_BYTES_MAX = 16 * 1024 * 1024
NAMES_CHARS_MAX = 200


OPTIONS = (
    click.argument("source", metavar="SOURCE"),
    click.option("--name", metavar="NAME", help="The model's name [the function's]."),
    click.option("--branch", metavar="NAME", help="The branch [main]."),
    click.option("--schema", "kind", flag_value="schema",
                 help="SOURCE is a class that validates answers of jobs, which name it with --validator."),
    click.option("--requirements", "requirements_file", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
                 help="Packages for a separate environment."),
    click.option("--python", metavar="PATH|3.x", help="The interpreter of the environment [batchmill's]."),
    click.option("--env", "variables", metavar="KEY=VALUE", multiple=True, help="An environment variable."),
    click.option("--secret", "secrets", metavar="KEY=env:NAME|file:PATH|secret:NAME", multiple=True,
                 help="A secret for the environment; batchmill stores only the reference."),
    click.option("--include", metavar="FILE", multiple=True, help="Additional files, folders or globs."),
    click.option("--workers", type=COUNT, help="Worker processes [1]."),
    click.option("--memory", "memory_bytes", type=ByteCount(), metavar="SIZE", help="Memory of a worker: 512MB, 2GiB."),
    click.option("--timeout", "timeout_s", type=CALL_TIME, metavar="SPAN", help="Time limit of one call: 30s [600s]."),
    click.option("--gpus", type=click.IntRange(min=0), help="GPUs of each worker [0]."),
    click.option("--batch-size", type=COUNT, help="The most rows in one call, from all callers."),
    click.option("--batch-window", "batch_window_s", type=CALL_TIME, metavar="SPAN",
                 help="The longest that an idle worker waits for a batch to fill: 5ms, 0 [10ms]."),
    click.option("--dataframe", metavar="COLUMNS|FILE", help="Columns of the data frame, or an example of it."),
    click.option("--idempotent", "is_idempotent", is_flag=True, help="Calls may be repeated after their worker died."),
    click.option("--deterministic", "is_deterministic", is_flag=True,
                 help="Equal rows have equal results: projects may reuse them."),
    click.option("--shared/--private", "is_shared", default=None,
                 help="Whether other projects may call it [unchanged; new: yes without a key, no with one]."),
    click.option("--received-shapes", is_flag=True, help="Pass tensors of one element as single values."),
    click.option("--example", "examples", metavar="JSON|FILE", multiple=True,
                 help="Arguments of a call that must succeed first."),
    click.option("--input-json", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
                 help="Inferless's older sample input: the schema, and a call that must succeed."),
    click.option("--output-json", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
                 help="Inferless's sample output: names that the function must return."),
)  # fmt: skip


def _options(command: Any) -> Any:
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@click.command()
@_options
@global_options
@click.pass_obj
def deploy(session: Session, source: str, **options: Any) -> int:
    """Deploy a Python function as a model with typed inputs and versions. Its code, and that of the packages it
    requires, runs as the user of the server (or of this command): deploy what you trust.

    SOURCE is FILE.py:NAME, package.module:NAME, a FOLDER (with FOLDER:FILE.py:NAME, or an app.py of Inferless's kind
    or Modelbit's source.py), or git+https://HOST/REPO@REVISION#subdirectory=FOLDER:FILE.py:NAME. The new version is
    started and called once before it is the latest; one that does not work is refused with its traceback.
    """
    return session.run(_deploy(session, source, options))


async def _deploy(session: Session, source: str, options: dict[str, Any]) -> int:
    include = options.pop("include")
    samples = {"input.json": options.pop("input_json"), "output.json": options.pop("output_json")}
    settings = settings_of(session, options)
    sample_paths = {name: Path(path).absolute() for name, path in samples.items() if path is not None}
    config = session.config()
    with bundled(source, settings, include=include, samples=sample_paths, cwd=session.cwd) as (order, bundle):
        if not session.as_json:
            session.say(f"deploying {clean(order.source)} as {clean(order.name)} …")
        async with session.open() as client:
            reply = await session.app.deploy(client, config, bundle)
    show_deployed(session, reply)
    return EXIT_OK


def settings_of(session: Session, options: dict[str, Any]) -> dict[str, Any]:
    """The given options as fields of an order. Raises: InvalidInput."""
    fields = {name: value for name, value in options.items() if value not in (None, False, ()) or name == "is_shared"}
    if (path := fields.pop("requirements_file", None)) is not None:
        fields["requirements"] = _read(Path(path))
    if "python" in fields and "/" in fields["python"]:
        fields["python"] = str(session.cwd / Path(fields["python"]).expanduser())
    if "variables" in fields:
        fields["environment"] = pairs(fields.pop("variables"), "--env")
    if "secrets" in fields:
        fields["secrets"] = {
            name: _secret(session, value) for name, value in pairs(fields["secrets"], "--secret").items()
        }
    if "dataframe" in fields:
        fields["frame_columns"] = columns_of(fields.pop("dataframe"), session.cwd)
    if "examples" in fields:
        fields["examples"] = [_example(text, session.cwd) for text in fields["examples"]]
    return fields


def _secret(session: Session, reference: str) -> str:
    """A reference to a secret with an absolute path, unless a server reads the file."""
    kind, _, path = reference.partition(":")
    if kind == "file" and session.server_url is None:
        return f"file:{session.cwd / Path(path).expanduser()}"
    return reference


def columns_of(text: str, cwd: Path) -> list[str]:
    """The columns in `text`, or those of an example file: CSV with a header, or JSON rows. Raises: InvalidInput."""
    path = cwd / Path(text).expanduser()
    if not path.is_file():
        columns = [each.strip() for each in text.split(",")]
    elif path.suffix.lower() == ".csv":
        columns = next(csv.reader(_read(path).splitlines()), [])
    else:
        columns = _json_columns(_read(path), text)
    if not columns or not all(columns) or len(set(columns)) < len(columns):
        raise InvalidInput(f"--dataframe {text!r} names no columns, or one column twice", code="missing_example")
    return columns


def _json_columns(text: str, shown: str) -> list[str]:
    lines = text.strip().splitlines()
    try:
        first = json.loads(lines[0] if len(lines) > 1 and not text.lstrip().startswith("[") else text)
    except (ValueError, IndexError):
        raise InvalidInput(f"--dataframe {shown!r} is neither CSV nor JSON rows", code="missing_example") from None
    row = first[0] if isinstance(first, list) and first else first
    return [str(name) for name in row] if isinstance(row, dict) else []


def _example(text: str, cwd: Path) -> Any:
    """Parse arguments: by name, by position, or the only argument of a function."""
    path = cwd / Path(text).expanduser() if not text.lstrip().startswith(("{", "[")) else None
    if path is not None and path.is_file():
        text = _read(path)
    try:
        value = json.loads(text)
    except ValueError:
        raise InvalidInput(f"--example {text[:80]!r} is neither JSON nor a file", code="invalid_example") from None
    return value if isinstance(value, dict | list) else [value]


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(EXAMPLE_BYTES_MAX + 1)
        if len(data) > EXAMPLE_BYTES_MAX:
            raise InvalidInput(f"{path} is longer than {EXAMPLE_BYTES_MAX:,} bytes", code="unreadable_file")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}", code="unreadable_file") from None


def show_deployed(session: Session, reply: DeployReply) -> None:
    if session.as_json:
        session.emit("deployed", version=reply.version, is_new=reply.is_new)
        return
    version = reply.version
    if not reply.is_new:
        session.print(f"already version {version.number}: {clean(version.reference)} is the same code")
        return
    session.print(f"{clean(version.reference)} is ready: {clean(signature_of(version), NAMES_CHARS_MAX)}")
    if version.schema is not None:
        session.say(f"jobs name it with --validator {version.name}")
        return
    session.say(
        f"call it at a server with POST /v1/{version.name}/latest; `batchmill models show {version.name}` says how"
    )


def signature_of(version: VersionInfo) -> str:
    """The signature of a version, in the form NAME(inputs)."""
    if version.schema is not None:
        return f"a schema with the fields {', '.join(version.schema.get('properties', ())) or 'of its own'}"
    if version.interface is None:
        return version.name
    inputs = []
    for tensor in version.interface.inputs:
        kind = tensor.datatype or "any"
        shape = "" if tensor.shape == [1] else str(tensor.shape).replace(" ", "")
        inputs.append(f"{tensor.name}{'' if tensor.required else '?'}: {kind}{shape}")
    if version.interface.takes_more:
        inputs.append("…")
    return f"{version.name}({', '.join(inputs)})"
