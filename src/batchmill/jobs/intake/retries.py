"""What a retry may change for the rows that it runs: fields of their requests, the model, the adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from batchmill.errors import InvalidInput
from batchmill.jobs.intake import routing
from batchmill.jobs.intake.adapters import ByModel, without_others
from batchmill.jobs.intake.media_orders import check_media_of_retry
from batchmill.models import registry
from batchmill.models.paths import answers
from batchmill.types import ModelSpec, Retried, RetryChange
from batchmill.wire.features import features_of
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import TableForm

RETRIES_MAX = 20  # that a job remembers, the newest
NAMES_SHOWN = 10  # of adapters, in a message
SHOWN_CHARS = 100  # of a name that is none
TokenLimit = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
StopText = Annotated[str, Meta(min_length=1, max_length=1000)]


class RetryParams(msgspec.Struct, forbid_unknown_fields=True):
    """Fields that a retry may change: how long or how bold an answer is. All else was checked row by row."""

    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    max_output_tokens: TokenLimit | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    reasoning_effort: Annotated[str, Meta(max_length=20)] | None = None


class Target(msgspec.Struct, frozen=True):
    """Where the rows of a retry go. None: where they went before."""

    number: int | None = None  # of the model in the job's models
    adapter: str | None = None  # its own name

    @property
    def used(self) -> ByModel:
        """The adapters that have to be loaded."""
        return {} if self.number is None or self.adapter is None else {self.number: [self.adapter]}


def prepared(
    spec: JobSpec, change: RetryChange, model: ModelSpec | None, generation: int, now: float
) -> tuple[JobSpec, Target]:
    """The job as this generation runs it, and where its rows go. Omitted fields are those of the job, not of the retry
    before.

    Args: model: what `change.model` names.
    Raises: InvalidInput, naming the value.
    """
    if change == RetryChange():
        return spec, Target()
    spec, target = _changed(spec, change, model, now)
    retried = Retried(change.params, change.model, change.adapter, generation)
    return replace(_loaded(spec, target), retries=[*spec.retries, retried][-RETRIES_MAX:]), target


def _changed(spec: JobSpec, change: RetryChange, model: ModelSpec | None, now: float) -> tuple[JobSpec, Target]:
    check_params(spec, change.params)
    if change.model is None and change.adapter is None:
        return spec, Target()
    _refuse_other_kind(spec, model)
    spec, number = _with_model(spec, model, change, now)
    chosen = spec.models[number]
    adapter = _adapter_of(chosen, change)
    _refuse_other_paths(spec, chosen)
    _refuse_fewer_features(spec, chosen)
    if isinstance(spec.form, TableForm):
        check_media_of_retry(spec.form, chosen)
    registry.checked_budget(spec.policy.budget, [chosen])
    called = change.adapter or change.model
    if spec.origin is not None:
        spec = replace(spec, used=list(dict.fromkeys([*spec.used, adapter or chosen.name])))
    if isinstance(spec.form, TableForm):
        spec = replace(spec, form=replace(spec.form, names_models=True))
    assert called is not None, "one of both is given"
    return spec, Target(number, adapter)


def keep_retries(spec: JobSpec, earlier: JobSpec) -> JobSpec:
    """The new spec of a job that is submitted again: it keeps what its retries changed, and their models."""
    if not earlier.retries:
        return spec
    form = spec.form
    if isinstance(form, TableForm) and isinstance(earlier.form, TableForm):
        form = replace(form, names_models=earlier.form.names_models)
    models = [*spec.models, *earlier.models[len(spec.models) :]]
    return replace(spec, retries=earlier.retries, models=models, form=form)


def check_params(spec: JobSpec, params: dict[str, Any]) -> None:
    """Raises: InvalidInput, naming the field."""
    if not params:
        return
    if all(model.takes_columns for model in spec.models):
        raise InvalidInput("only requests to language models have fields to change", code="invalid_retry_params")
    for name in params:
        if name not in RetryParams.__struct_fields__:
            raise InvalidInput(
                f"a retry cannot change {name!r}; it can change {', '.join(RetryParams.__struct_fields__)}",
                code="invalid_retry_params",
            )
    try:
        msgspec.convert(params, RetryParams)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"a retry cannot do that: {error}", code="invalid_retry_params") from None


def _refuse_other_kind(spec: JobSpec, model: ModelSpec | None) -> None:
    if all(each.takes_columns for each in spec.models):
        raise InvalidInput(
            "only rows that are requests to language models can go to another model in a retry: a function or a "
            "connector's model takes the columns by name",
            code="invalid_retry_model",
        )
    if model is not None and model.takes_columns:
        raise InvalidInput(
            f"the rows of the job {spec.id} are requests to language models, and {model.name!r} is a function or a "
            "connector's model: name a language model",
            code="invalid_retry_model",
        )


def _with_model(
    spec: JobSpec, model: ModelSpec | None, change: RetryChange, now: float
) -> tuple[JobSpec, int]:  # fmt: skip
    """The job with the model, and the model's number. The job's own settings of a model that it has stay."""
    if model is None:
        return spec, _only_host(spec.models, change.adapter or "")
    names = [each.name for each in spec.models]
    if model.name in names:
        number = names.index(model.name)
        return replace(spec, models=_replaced(spec.models, number, _merged(spec.models[number], model))), number
    number = len(spec.models)
    spec = replace(spec, models=[*spec.models, model])
    if model.needs_route:
        choice = routing.choose(model, 1, None, spec.policy.deadline, now, {})
        spec = routing.with_choices(spec, {number: choice})
    return spec, number


def _only_host(models: Sequence[ModelSpec], adapter: str) -> int:
    """The number of the model that has this adapter. Raises: InvalidInput."""
    hosts = [number for number, model in enumerate(models) if model.targets().get(adapter) is not None]
    if len(hosts) == 1:
        return hosts[0]
    problem = "no model of the job has" if not hosts else "several models of the job have"
    raise InvalidInput(
        f"{problem} an adapter {adapter[:SHOWN_CHARS]!r}: name its model too (--model)", code="invalid_retry_model"
    )


def _merged(own: ModelSpec, named: ModelSpec) -> ModelSpec:
    """A model of the job, with the adapters and names that it may use now."""
    allowed = None
    if own.allowed is not None:
        allowed = list(dict.fromkeys([*own.allowed, *(named.allowed or ())]))
    return replace(
        own, adapters=named.adapters | own.adapters, adapter_names=named.adapter_names | own.adapter_names,
        bad_adapters=named.bad_adapters | own.bad_adapters, adapter_rank=max(own.adapter_rank, named.adapter_rank),
        allowed=allowed,
    )  # fmt: skip


def _adapter_of(model: ModelSpec, change: RetryChange) -> str | None:
    """The own name of the adapter that rows are to call; None: the base. Raises: InvalidInput."""
    targets = model.targets()
    called = change.adapter or change.model or model.name
    if change.adapter is None and called not in targets:  # ENGINE:SOURCE, which has been resolved to the model
        return None
    if called not in targets:
        known = [name for name, adapter in targets.items() if adapter is not None]
        more = f" and {len(known) - NAMES_SHOWN:,} more" if len(known) > NAMES_SHOWN else ""
        shown = ", ".join(known[:NAMES_SHOWN]) or "none"
        raise InvalidInput(
            f"{model.name} has no adapter {called[:SHOWN_CHARS]!r}; it has {shown}{more}",
            code="unknown_adapter",
        )
    if change.adapter is not None and targets[called] is None:
        raise InvalidInput(f"{called!r} is a model and no adapter: name it with --model", code="unknown_adapter")
    return targets[called]


def _refuse_other_paths(spec: JobSpec, model: ModelSpec) -> None:
    """Refuse a model that does not answer the one path that all rows have."""
    url = spec.form.url if isinstance(spec.form, TableForm) else spec.endpoint
    if url is not None and not answers(model, url):
        raise InvalidInput(f"{model.name} does not answer {url}, which the rows call", code="invalid_retry_model")


def _refuse_fewer_features(spec: JobSpec, model: ModelSpec) -> None:
    """Refuse a model of a server whose callers may ask for less: the rows were checked for the models they had."""
    if spec.origin is None:
        return
    had = {name for each in spec.models if each.name in spec.used for name in features_of(each)}
    if fewer := sorted(had - features_of(model)):
        raise InvalidInput(
            f"{model.name} does not allow {', '.join(fewer)}, which the rows may use", code="invalid_retry_model"
        )


def _replaced(models: Sequence[ModelSpec], number: int, model: ModelSpec) -> list[ModelSpec]:
    return [model if at == number else each for at, each in enumerate(models)]


def _loaded(spec: JobSpec, target: Target) -> JobSpec:
    """The job without the adapters of a new model that no row calls: its spec is sent often."""
    if target.number is None:
        return spec
    model = spec.models[target.number]
    is_new = target.number == len(spec.models) - 1 and model.traits.loads_adapters and model.adapter_rank
    if not is_new:
        return spec
    used = [] if target.adapter is None else [target.adapter]
    return replace(spec, models=_replaced(spec.models, target.number, without_others(model, used)))
