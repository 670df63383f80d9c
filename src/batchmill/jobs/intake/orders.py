"""Turns an order into a job spec: form, identity, and whether the job already exists."""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from batchmill.datasets import sealing, sources
from batchmill.datasets.sealed import load_seal
from batchmill.errors import InvalidDataset, InvalidInput, InvalidTransition, ModelFailed
from batchmill.jobs.intake import fetching
from batchmill.jobs.intake.media_orders import check_media
from batchmill.jobs.intake.reuse_orders import ALL, DETERMINISTIC, NONE, UNREADABLE
from batchmill.jobs.ledger.files import JobFiles, is_folder, read_spec, result_exists
from batchmill.jobs.ledger.packed import may_be_small
from batchmill.jobs.results.parts.output_folders import read_manifest
from batchmill.jobs.results.results import check_kind, check_output, errors_of, stored_name
from batchmill.models import functions, registry
from batchmill.object_store.urls import is_object_url
from batchmill.optional import require
from batchmill.states import JobState
from batchmill.store.sql.transactions import Record
from batchmill.store.stored_files import StoredFiles
from batchmill.types import (
    Amendment,
    JobOrder,
    ModelSpec,
    OutputSchema,
    Policy,
    PromptTemplate,
    ReplyRules,
)
from batchmill.types.engine_traits import ENGINES, Source
from batchmill.wire import sampling
from batchmill.wire.input_urls import is_fetched, is_input_url
from batchmill.wire.job_spec import EXISTS, OUTDATED, JobSpec
from batchmill.wire.replies import FLAWS
from batchmill.wire.rows import forms
from batchmill.wire.rows.forms import (
    ANSWERED_BY,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    FETCHED,
    RESPONSES,
    RESULT_COLUMNS,
    WARNINGS_COLUMN,
    Form,
    OpenAIForm,
    TableForm,
)
from batchmill.wire.schemas.output_schema import (
    SCHEMA_ATTEMPTS_MAX,
    SCHEMA_URLS,
    VALIDATION,
    columns_of,
    needless_schema,
)

PRIORITY_MAX = 100
PREFIX_CHARS_MAX = 100
TEMPLATE_BYTES_MAX = 256 * 1024

CHOICES = {
    "on_invalid": ("fail", "skip"), "on_engine_failure": ("pause", "fail"), "reuse": (NONE, DETERMINISTIC, ALL, None),
}  # fmt: skip


def check(policy: Policy, models: list[ModelSpec], now: float) -> None:
    """Raises: InvalidInput, naming the value."""
    for name, allowed in CHOICES.items():
        if getattr(policy, name) not in allowed:
            known = " or ".join(filter(None, allowed))
            raise InvalidInput(f"{name} is {getattr(policy, name)!r}; it can be {known}", code="invalid_policy")
    if not -PRIORITY_MAX <= policy.priority <= PRIORITY_MAX:
        raise InvalidInput(
            f"the priority must be {-PRIORITY_MAX} to {PRIORITY_MAX}, not {policy.priority}", code="invalid_priority"
        )
    if policy.deadline is not None and not (math.isfinite(policy.deadline) and policy.deadline > now):
        raise InvalidInput(
            f"the deadline {policy.deadline} is not ahead: give a time after {now:.0f}, in seconds since the epoch",
            code="invalid_deadline",
        )
    if policy.budget is not None and not (math.isfinite(policy.budget) and policy.budget > 0):
        raise InvalidInput(f"the budget must be more than 0 USD, not {policy.budget}", code="invalid_budget")
    registry.checked_budget(policy.budget, models)


def amended(spec: JobSpec, change: Amendment, now: float) -> Policy:
    """The policy after an amendment. Raises: InvalidInput."""
    fields = {name: value for name in Amendment.__struct_fields__ if (value := getattr(change, name)) is not None}
    if not fields:
        raise InvalidInput("nothing was named that is to change: priority, deadline or budget", code="nothing_to_amend")
    policy = replace(spec.policy, **fields)
    # A deadline that has passed meanwhile is left alone: it ends the job by itself.
    check(policy if "deadline" in fields else replace(policy, deadline=None), spec.models, now)
    return policy


def check_rows_may_wait(spec: JobSpec, state: str) -> None:
    """Raises: InvalidTransition if no row of the job can be waiting for a service."""
    if not any(model.traits.waits_for_service for model in spec.models):
        engines = {model.engine for model in spec.models}
        waiting = [name for name, traits in ENGINES.items() if traits.waits_for_service]
        raise InvalidTransition(
            f"the job {spec.id} runs on {', '.join(sorted(engines))}: only rows of services that are called row by row "
            f"({', '.join(waiting)}) wait after they failed; `cancel` ends a job without its other rows"
        )
    if state not in (JobState.QUEUED, JobState.RUNNING, JobState.PAUSED):
        raise InvalidTransition(f"the job {spec.id} is {state}: rows wait only while a job runs or is paused")


def without_past_deadline(spec: JobSpec, now: float) -> JobSpec:
    """The policy without a deadline that has passed: a job that runs again must not expire at once."""
    deadline = spec.policy.deadline
    if deadline is None or deadline > now:
        return spec
    return replace(spec, policy=replace(spec.policy, deadline=None))


APART = b'{"type":"openai","id_prefix":"batch_req_"}'  # a job's form in its identity, since before there was another
PROMPT_URLS = (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES)


def describe(order: JobOrder, now: float) -> JobSpec:
    """The spec of an order, with a new id. Raises: InvalidInput if the order cannot run."""
    if not order.models:
        raise InvalidInput("a job needs a model: name one with --model", code="no_model")
    format = fetching.detect_format(order.dataset)
    job_id = f"job_{secrets.token_hex(10)}"
    form = _form(order, format, job_id)
    if order.output is not None:
        assert order.origin is None or is_object_url(order.output), "a server writes no file of its machine for callers"
        check_output(order.output, format, order.output_format)
        if not is_folder(order.output) and order.output_format != "jsonl":
            raise InvalidInput(
                f"the name of the output {order.output!r} says its format: leave out {order.output_format!r}, or end "
                "the output with a slash to write parts",
                code="invalid_output",
            )
        _refuse_inputs(order.dataset.paths, outputs(order.output, form))
    else:
        check_kind(stored_name(order.output_format), format)
    if order.part_rows is not None:
        _check_part_rows(order.part_rows, order.output)
    check(order.policy, order.models, now)
    _check_replies(order)
    if order.sample is not None:
        sampling.check(order.sample)
    is_command = order.origin is None
    return JobSpec(
        id=job_id,
        dataset=order.dataset,
        models=order.models,
        form=form,
        policy=order.policy,
        replies=order.replies,
        output=order.output,
        output_format=order.output_format,
        part_rows=order.part_rows,
        identity=identity(order, form) if is_command else f"only {job_id}",
        work=work_of(order, form) if is_command or order.sample is not None else "",
        sample=order.sample,
        may_overwrite=order.overwrite or order.update,
        code=code_of(order.models, by_frontend=order.origin is not None),
        created=now,
        endpoint=order.endpoint,
        rows_max=order.rows_max,
        default_model=order.default_model,
        project=order.project,
        labels=order.labels,
        origin=order.origin,
        is_small=_may_be_small(order),
    )


def _may_be_small(order: JobOrder) -> bool:
    """Whether the job may lie in the database. Rows with additions, and results of others, lie in files."""
    is_at_server = order.origin is not None and order.output is None
    is_whole = order.template is None and not order.media and order.policy.reuse in (NONE, None)
    return is_at_server and is_whole and may_be_small(order.dataset)


def _check_replies(order: JobOrder) -> None:
    """Raises: InvalidInput, naming the value."""
    for name in order.replies.fail_on:
        if name not in FLAWS:
            raise InvalidInput(f"fail_on names {name!r}; it can name {', '.join(FLAWS)}", code="invalid_fail_on")
    if order.replies.fail_on and all(model.takes_columns for model in order.models):
        raise InvalidInput(
            "fail_on is for the replies of language models: a function that returns is a result; raise an error in it",
            code="invalid_fail_on",
        )
    if order.schema is not None:
        _check_schema(order, order.schema)


def _check_schema(order: JobOrder, schema: OutputSchema) -> None:
    """Raises: InvalidInput."""
    require(f"{VALIDATION}:check_schema", "a schema")(schema)
    if len(schema.prefix) > PREFIX_CHARS_MAX or not schema.prefix.isprintable():
        raise InvalidInput(
            f"a prefix of columns has at most {PREFIX_CHARS_MAX} characters, all of them printable",
            code="invalid_field_prefix",
        )
    if not 0 <= schema.attempts <= SCHEMA_ATTEMPTS_MAX:
        raise InvalidInput(
            f"an answer is asked for again 0 to {SCHEMA_ATTEMPTS_MAX} times, not {schema.attempts}",
            code="invalid_schema_attempts",
        )
    if all(model.takes_columns for model in order.models):
        raise needless_schema()
    url = order.url or CHAT
    if url not in SCHEMA_URLS:
        raise InvalidInput(f"a schema is for {' and '.join(SCHEMA_URLS)}, not for {url}", code="schema_not_supported")
    for name in sorted({"response_format", "n"} & order.params.keys()):
        raise InvalidInput(f"--param cannot set {name} beside a schema: leave one of both out", code="schema_conflict")
    for name in columns_of(schema):
        if name in (*RESULT_COLUMNS, WARNINGS_COLUMN, FETCHED, ANSWERED_BY):
            raise InvalidInput(
                f"the field {name!r} has the name of a column of the results: give the fields a prefix",
                code="column_conflict",
            )


def _check_part_rows(part_rows: int, output: str | None) -> None:
    if part_rows < 1:
        raise InvalidInput(f"a part has at least 1 row, not {part_rows}", code="invalid_part_rows")
    if output is None or not is_folder(output):
        raise InvalidInput(
            f"--part-rows {part_rows} is for an output that is a folder: end it with a slash", code="invalid_part_rows"
        )


def code_of(models: list[ModelSpec], *, by_frontend: bool) -> dict[str, str]:
    """Model -> sha256 of its function's source, as it is now.

    `by_frontend`: a job is given all models of a server; a model whose file is gone stops only jobs whose rows need it.
    Raises: ModelFailed for a file that cannot be read, otherwise.
    """
    code = {}
    for model in models:
        if model.traits.source is Source.CODE:
            try:
                code[model.name] = functions.digest(model.source)
            except ModelFailed:
                if not by_frontend:
                    raise
                code[model.name] = UNREADABLE
    return code


def outputs(output: str, form: Form) -> list[str]:
    """The files that results may be written to, or their folder."""
    return [output, errors_of(output)] if form.errors_apart and not is_folder(output) else [output]


def _refuse_inputs(inputs: list[str], written: list[str]) -> None:
    """Refuse an output that is one of the inputs, under whatever name, or a folder that holds one."""
    for path in written:
        for source in inputs:
            if _is_same_file(path, source):
                raise InvalidInput(f"{path} is an input: results cannot be written over it", code="output_is_input")


def _is_same_file(path: str, source: str) -> bool:
    if is_folder(path):  # parts beside the input would be input of the same command later
        if not (is_input_url(path) or is_input_url(source)):
            path, source = os.path.join(os.path.realpath(path), ""), os.path.realpath(source)
        return source.startswith(path)
    if is_input_url(path) or is_input_url(source):
        return path == source
    same = os.path.realpath(path) == os.path.realpath(source)
    return same or (os.path.exists(path) and os.path.samefile(path, source))


def has_run(record: Record) -> bool:
    """Whether the ledger counts an outcome of a model."""
    return record["rows_ok"] + record["rows_failed"] > record["rows_rejected"]


def check_code(spec: JobSpec, now: dict[str, str], way_out: str) -> None:
    """Raises: InvalidInput when a function that the job's rows need is not the one it began with."""
    for model in spec.models:
        if (spec.used and model.name not in spec.used) or spec.code.get(model.name) == UNREADABLE:
            continue
        if spec.code.get(model.name) != now.get(model.name):
            raise InvalidInput(f"{model.source} changed since the job {spec.id} began: {way_out}", code="code_changed")


def _form(order: JobOrder, format_: str, job_id: str) -> Form:
    mapped = {
        "--prompt": order.prompt,
        "--template": order.template,
        "--system": order.system,
        "--url": order.url,
        "--param": order.params or None,
    }
    mapped |= {"--model-column": order.model_column, "--adapter-column": order.adapter_column}
    mapped["--allow-constant-prompt"] = order.constant_prompt or None
    mapped |= {f"--{each.kind}": each.column for each in order.media}
    given = [flag for flag, value in mapped.items() if value is not None]
    if format_ == "openai":
        if given:
            raise InvalidInput(
                f"{given[0]} makes requests from the columns of a table, but {order.dataset.paths[0]} holds OpenAI "
                "batch rows, which are requests already: leave it out, or say --format jsonl to read them as a table",
                code="prompt_without_table",
            )
        return OpenAIForm(id_prefix=_id_prefix(job_id), together=order.together, schema=order.schema)
    calls = [model.name for model in order.models if not model.takes_columns]
    if order.prompt is None and order.template is None:
        if given:
            raise InvalidInput(f"{given[0]} has no effect without --prompt or --template", code="missing_prompt")
        if calls:
            raise InvalidInput(
                f"{order.dataset.paths[0]} is a table: say how a row becomes a request to {calls[0]!r} with --prompt "
                '"… {column} …" or --template FILE',
                code="missing_prompt",
            )
        return TableForm(is_text=format_ == "csv")
    if not calls:
        raise InvalidInput(
            f"{given[0]} is for language models: a function takes the columns by name", code="needless_prompt"
        )
    if order.template is not None:
        _check_template(order, order.template)
    check_media(order)
    url = order.url or CHAT
    if url not in PROMPT_URLS:
        raise InvalidInput(f"{given[0]} cannot fill {url!r}: use one of {', '.join(PROMPT_URLS)}", code="invalid_url")
    if order.system is not None and url not in (CHAT, RESPONSES):
        raise InvalidInput(f"{url} knows no system prompt: put the text into {given[0]}", code="invalid_url")
    for text in (order.prompt, order.system):
        forms.parse(text or "")
    return TableForm(
        prompt=order.prompt, template=order.template, system=order.system, url=url, params=order.params,
        media=order.media, schema=order.schema,
        may_be_constant=order.constant_prompt, model_column=order.model_column, adapter_column=order.adapter_column,
    )  # fmt: skip


def _check_template(order: JobOrder, template: PromptTemplate) -> None:
    """Raises: InvalidInput. Whether it is one, and which columns it names, is checked where it can be stopped."""
    if order.prompt is not None:
        raise InvalidInput("--prompt and --template both make the prompt: leave one of them out", code="two_prompts")
    if not template.text.strip():
        raise InvalidInput(f"{template.name} is empty: write the prompt of a row into it", code="invalid_template")
    if len(template.text.encode()) > TEMPLATE_BYTES_MAX:
        raise InvalidInput(
            f"{template.name} has more than {TEMPLATE_BYTES_MAX:,} bytes: make it shorter", code="invalid_template"
        )
    if names := [model.name for model in order.models if model.takes_columns]:
        raise InvalidInput(
            f"{names[0]} is a function, which takes the columns by name: leave it out of a job with a template",
            code="needless_prompt",
        )


def _id_prefix(job_id: str) -> str:
    return f"batch_req_{job_id.removeprefix('job_')}_"


def identity(order: JobOrder, form: Form) -> str:
    """sha256 of what a job computes and where to; without its input, code, workers, limits and prices."""
    shown_form: Form | msgspec.Raw = form
    if isinstance(form, OpenAIForm):
        shown_form = replace(form, id_prefix=OpenAIForm().id_prefix)
        if shown_form == OpenAIForm():
            shown_form = msgspec.Raw(APART)
    elif form.template is not None:  # wherever its file lies
        shown_form = replace(form, template=PromptTemplate(form.template.text))
    what = {
        "form": shown_form,
        "format": order.dataset.format,
        "models": [_computed(model) for model in order.models],
        "dedupe": order.policy.dedupe,
        "output": order.output,
    }
    if order.replies != ReplyRules():
        what["replies"] = order.replies
    if order.media:  # a copy of the dataset elsewhere may have other files beside it
        what["media_folders"] = [order.dataset.media_folder, *sorted(set(map(os.path.dirname, order.dataset.paths)))]
    if order.part_rows is not None:
        what["part_rows"] = order.part_rows
    if order.output is not None and order.output_format != "jsonl":
        what["output_format"] = order.output_format
    return hashlib.sha256(msgspec.json.encode(what, order="deterministic")).hexdigest()


def work_of(order: JobOrder, form: Form) -> str:
    """As `identity`, wherever the results go."""
    return identity(replace(order, output=None, part_rows=None), form)


def _computed(model: ModelSpec) -> list[object]:
    parts: list[object] = [model.name, model.engine, model.source, model.adapters, model.base_url]
    if model.function is not None:
        parts += [model.function.version, model.function.digest]
    if model.connector is not None:
        parts.append(model.connector)
    if model.provider is not None:
        parts.append(model.provider)
    return [*parts, *map(_computed, model.routes)]


def placed(spec: JobSpec, data_dir: Path, stored: StoredFiles, *, is_shared: bool) -> JobSpec:
    """The job where it runs. The nodes of a cluster (`is_shared`) do not see what is unpacked in the memory of this
    machine. With `[storage]` they see none of its files: those of its user are copied, and become objects with the
    dataset. What cells name is copied too: see `store.media_copies`.
    """
    if (is_shared or stored.is_elsewhere) and spec.dataset.media_folder is not None:
        dataset = msgspec.structs.replace(spec.dataset, media_copies="objects" if stored.is_elsewhere else "folder")
        spec = msgspec.structs.replace(spec, is_small=False, dataset=dataset)
    if not is_shared:
        return spec
    is_users = any(path.startswith("/") and not Path(path).is_relative_to(data_dir) for path in spec.dataset.paths)
    copies = spec.dataset.copy or (stored.has_nodes and is_users)
    return msgspec.structs.replace(spec, is_small=False, dataset=msgspec.structs.replace(spec.dataset, copy=copies))


def new_id_form(spec: JobSpec, job_id: str) -> JobSpec:
    """The same description as another job's: when an order turns out to be that job."""
    form = spec.form
    if isinstance(form, OpenAIForm):
        form = msgspec.structs.replace(form, id_prefix=_id_prefix(job_id))
    return msgspec.structs.replace(spec, id=job_id, form=form)


def same_input(spec: JobSpec, files: JobFiles) -> bool:
    """Whether the files an order names are, to the byte, those of an earlier job. Raises: DatasetDamaged."""
    try:
        sealed = load_seal(files.dataset)
    except InvalidDataset:
        # It was never read to its end: it is read again. Where even its description is gone, so is the job.
        return files.spec.exists() and files.read_spec().dataset.paths == spec.dataset.paths
    if any(map(is_fetched, spec.dataset.paths)):  # it is read once: the sealed copy is the input
        return files.read_spec().dataset.paths == spec.dataset.paths
    if [file.path for file in sealed.sources] == spec.dataset.paths and all(map(sources.unchanged, sealed.sources)):
        return True
    sizes = [file.size_bytes for file in sealed.sources]
    if [sources.describe(path).size_bytes for path in spec.dataset.paths] != sizes:
        return False
    return sealing.digest(spec.dataset.paths) == sealed.digest


def is_sample(record: Record) -> bool:
    """Whether a job rests at, or in, its sample: until it goes on, others may write to its output."""
    if record["state"] != JobState.PAUSED or record["cancelling"] is not None:
        return False
    done = record["rows_ok"] + record["rows_failed"] + record["rows_folded"]
    is_whole = record["rows"] > 0 and done >= record["rows"]
    return not is_whole and read_spec(record["spec"]).sample is not None


def refuse_shared_output(spec: JobSpec, records: Sequence[Record], finished: float | None = None) -> None:
    """Two jobs never write to one file. `finished` is when this job published; who published later owns the file.

    Raises: InvalidInput, naming the other job.
    """
    if spec.output is None:
        return
    mine = set(outputs(spec.output, spec.form))
    for record in records:
        other, state = read_spec(record["spec"]), JobState(record["state"])
        if other.id == spec.id or other.output is None or is_sample(record):
            continue
        shared = sorted(mine.intersection(outputs(other.output, other.form)))
        if not shared:
            continue
        if not state.is_at_rest:
            raise InvalidInput(
                f"the unfinished job {other.id} writes to {shared[0]}: let it end, cancel it or choose another output",
                code="output_taken",
            )
        if finished is not None and state is JobState.COMPLETED and record["finished"] > finished:
            raise InvalidInput(
                f"the job {other.id} has written {shared[0]} since: run the command again with another output",
                code="output_taken",
            )


def may_replace(
    order: JobOrder, spec: JobSpec, known: Record | None, records: Sequence[Record], *, is_same: bool
) -> bool:
    """Whether the job may write over what its output holds.

    Args: known: the job that an identical order created; `is_same`: over the same input. records: jobs with outputs.
    Raises: InvalidInput for the results of a finished job that computed something else, unless the order says so.
    """
    if order.overwrite or order.update:
        return True
    if known is not None and (is_same or order.restart or known["state"] != JobState.COMPLETED):
        return True
    others = (each for each in records if each["state"] == JobState.COMPLETED and each["output"] == spec.output)
    finished = known or next(others, None)
    if finished is not None and spec.output is not None and result_exists(spec.output):
        raise InvalidInput(
            f"{spec.output} has the results of the job {finished['id']}, whose rows, prompt, model or options "
            "were others: --update runs what is new and takes over the rest, --overwrite runs all",
            code=OUTDATED,
        )
    return known is not None


def checked_output(spec: JobSpec, *, may_replace: bool) -> JobSpec:
    """The spec, with the job whose manifest in the output folder it replaces.

    Args: may_replace: existing results may be written over.
    Raises: InvalidInput.
    """
    if spec.output is None:
        return spec
    if not may_replace:
        _refuse_existing_output(spec.output, spec.form)
    manifest = read_manifest(spec.output) if is_folder(spec.output) else None
    return spec if manifest is None else replace(spec, replaced_job=manifest.job)


def _refuse_existing_output(output: str, form: Form) -> None:
    for path in outputs(output, form):
        if result_exists(path):
            raise InvalidInput(
                f"{path} exists and is not this job's: choose another output, or write over it with --overwrite",
                code=EXISTS,
            )
