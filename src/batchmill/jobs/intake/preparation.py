"""Before a row runs: seal the dataset and plan its rows.

It runs in a child process of the owner, once for every job: it does not import the database.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from batchmill import faults
from batchmill.datasets.checking.spans import Checks
from batchmill.datasets.folders import DiskFolder, Folder
from batchmill.datasets.orders import KeepMedia, SealOrder, check_disk
from batchmill.datasets.sealing import Elsewhere, seal_with_retry
from batchmill.datasets.validation import HubPatterns
from batchmill.errors import InvalidInput, OverQuota
from batchmill.jobs.intake import fetching, routing
from batchmill.jobs.intake.fetching import FETCH_SHARE, PREVIEW_TIME_S, TIME_S, Bounds, Fetched
from batchmill.jobs.intake.reuse_orders import NONE, is_deterministic, targets, write_keys
from batchmill.jobs.intake.routing import Choice
from batchmill.jobs.ledger import plan
from batchmill.jobs.ledger.plan import Plan, PlanOrder
from batchmill.jobs.results.results import COLUMNS_MAX, output_kind, written_name
from batchmill.models.paths import paths_of
from batchmill.object_store.credentials import environment_with
from batchmill.owned_files import OwnedFiles
from batchmill.owner_term import PatientTerm, term_at
from batchmill.store.media_copies import FolderCopies, MediaCopies, ObjectCopies, SharedCopies
from batchmill.store.objects import StoreObjects
from batchmill.types import ModelSpec, Problem
from batchmill.wire.features import features_of
from batchmill.wire.input_urls import is_fetched
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.native import SealReport
from batchmill.wire.rows.forms import URLS, TableForm
from batchmill.wire.rows.rendered_rows import ROW_FAULTS

TARGETS_MAX = 2**16 - 2  # models and adapters of one job: a row's has a number of 16 bits
SEALING_SHARE = 0.85  # of the progress that is shown


class NodeChecks(Struct, frozen=True):
    """What nodes of a cluster have found in the rows, in objects below a URL."""

    store: str
    checks: Checks


class CopyOrder(Struct, frozen=True):
    """Where the files that cells name are copied: a folder, or objects of a store, while this process owns them."""

    folder: str  # or what the names of objects begin with
    shared: str = ""  # the folder with those of the project's jobs
    store: str = ""
    term: str = ""  # see `Term.path`


class PrepareOrder(Struct, frozen=True):
    spec: JobSpec
    dataset: str  # folders to write to
    plan: str
    now: float = 0.0  # seconds since the epoch; as the following, for models with routes
    rates: dict[str, float] = {}  # of earlier jobs: see routing.choose
    bytes_left: int | None = None  # as in SealOrder
    no_space_message: str = ""
    hub: dict[str, str] = {}  # variables that a hub is reached with, if inputs are there
    is_preview: bool = False  # nothing is fetched: rows of adapters yet to be fetched are planned with their base
    checks: NodeChecks | None = None  # None: all rows are checked on this machine
    copies: CopyOrder | None = None  # None: nothing is copied
    term: str = ""  # see `Term.path`: a successor may seal the same job in the same folder

    def __repr__(self) -> str:  # without the token
        return f"PrepareOrder({self.spec.id})"


class Prepared(Struct, frozen=True):
    """`plan` is None if the dataset was refused, or while `wanted` adapters must be fetched first."""

    report: SealReport
    plan: Plan | None
    rejected: dict[str, tuple[int, str]] = {}  # code -> (refused rows, one message)
    choices: dict[int, Choice] = {}  # number of a model with routes -> the one that is taken
    wanted: dict[int, list[str]] = {}  # number of a model -> ids of a hub that rows name: without them there is no plan
    flaws: list[str] = []  # of `PrepareOrder.checks`
    copied_bytes: int = 0  # of files that cells name


def prepare(order: bytes, progress: Callable[[float], None]) -> bytes:
    """Offloaded: PrepareOrder in, Prepared out, both as JSON."""
    request = msgspec.json.decode(order, type=PrepareOrder)
    term = PatientTerm(term_at(request.term))
    folders = (DiskFolder(Path(each), term) for each in (request.dataset, request.plan))
    return msgspec.json.encode(prepare_in(request, *folders, progress))


def prepare_in(
    request: PrepareOrder, dataset: Folder, plan_folder: Folder, progress: Callable[[float], None]
) -> Prepared:
    """Seal the dataset, and plan its rows unless they are refused or adapters are missing, into these folders."""
    spec = request.spec
    sealing = msgspec.structs.replace(
        seal_order(spec), bytes_left=request.bytes_left, no_space_message=request.no_space_message
    )
    time_s = PREVIEW_TIME_S if request.is_preview and request.bytes_left is not None else TIME_S
    bounds = Bounds(request.bytes_left, request.no_space_message, time_s)
    elsewhere = _elsewhere(request.checks)
    with environment_with(request.hub), _copies(request) as copies:
        report, fetched = _sealed(
            sealing, bounds, dataset, lambda share: progress(share * SEALING_SHARE), elsewhere,
            None if copies is None else copies.keep,
        )  # fmt: skip
        copied_bytes = 0
        if copies is not None:
            copies.finish()
            copied_bytes = copies.size_bytes
            faults.point("after_copies")
    flaws = [] if elsewhere is None else elsewhere.flaws
    planned = None
    choices: dict[int, Choice] = {}
    causes: dict[str, tuple[int, str]] = {}
    may_run = report.rejected == 0 or spec.policy.on_invalid == "skip" or _has_only_faults(spec, dataset, report)
    if may_run and report.adapters and not request.is_preview:
        return Prepared(report, None, wanted=_by_model(sealing, report.adapters), flaws=flaws)
    if may_run:
        seal = report.seal
        if stores_requests(spec):
            write_keys(spec, dataset.path, OwnedFiles(PatientTerm(term_at(request.term))))
        wanted = plan_order(spec, seal.rows, is_columnar=seal.is_columnar)

        def cut(targets: list[plan.TargetPlan]) -> list[plan.ShardRows]:
            choices.update(choose_routes(request, targets))
            models = routing.with_choices(spec, choices).models
            options = {"is_columnar": seal.is_columnar, "is_small": spec.is_small}
            return [plan.shard_rows(model, seal.rows, **options) for model in models]

        planned = plan.make(wanted, dataset, plan_folder, lambda share: progress(SEALING_SHARE + share * 0.15), cut)
        for refused in plan.iter_rejected(dataset):
            rows, sample = causes.get(refused.code, (0, refused.message))
            causes[refused.code] = rows + 1, sample
        fetched.tidy()
    else:
        _clear_fetched(dataset)
    return Prepared(report, planned, causes, choices, flaws=flaws, copied_bytes=copied_bytes)


def _copies(request: PrepareOrder) -> AbstractContextManager[MediaCopies | None]:
    order = request.copies
    if order is None:
        return nullcontext()
    if order.store:
        objects = StoreObjects(order.store, term_at(order.term))
        return MediaCopies(ObjectCopies(objects, order.folder))
    owned = OwnedFiles(PatientTerm(term_at(request.term)))
    shared = SharedCopies(Path(order.shared), owned)
    check = partial(check_disk, Path(request.dataset))
    return MediaCopies(FolderCopies(Path(order.folder), shared, check, owned))


def _elsewhere(found: NodeChecks | None) -> Elsewhere | None:
    return None if found is None else Elsewhere(found.checks, StoreObjects(found.store).get)


def _sealed(
    order: SealOrder, bounds: Bounds, folder: Folder, progress: Callable[[float], None], elsewhere: Elsewhere | None,
    keep: KeepMedia | None,
) -> tuple[SealReport, Fetched]:  # fmt: skip
    """Fetch the inputs that lie elsewhere, and seal the dataset."""
    fetched = Fetched(folder, order.dataset.paths, {})
    try:
        fetched = fetching.fetch(order.dataset, folder, bounds, lambda share: progress(share * FETCH_SHARE))
        share_before = FETCH_SHARE if fetched.sources else 0.0
        report = seal_with_retry(
            msgspec.structs.replace(order, dataset=msgspec.structs.replace(order.dataset, paths=fetched.paths)),
            folder, lambda share: progress(share_before + share * (1 - share_before)), elsewhere, keep,
        )  # fmt: skip
    except (InvalidInput, OverQuota) as error:
        _clear_fetched(folder)
        raise fetched.error(error) from None
    return fetched.named(report), fetched


def _clear_fetched(folder: Folder) -> None:
    if folder.is_on_disk:
        fetching.clear(folder.on_disk())


def _by_model(order: SealOrder, adapters: list[str]) -> dict[int, list[str]]:
    """Adapters yet to be fetched, by the number of the model that they are for."""
    patterns, found = HubPatterns(order.patterns), {}
    for name in adapters:
        base = patterns.base_of(name)
        assert base is not None, f"{name!r} was found by these patterns"
        found.setdefault(base[0], []).append(name)
    return found


def choose_routes(request: PrepareOrder, targets: Sequence[plan.TargetPlan]) -> dict[int, Choice]:
    """Choose a route for every model that has several, by its rows: number of the model -> choice."""
    choices = {}
    for number, model in enumerate(request.spec.models):
        if model.needs_route:
            mine = [target for target in targets if target.model == number]
            tokens = [target.tokens for target in mine]
            rows, total = sum(target.rows for target in mine), None if None in tokens else sum(filter(None, tokens))
            deadline = request.spec.policy.deadline
            choices[number] = routing.choose(model, rows, total or None, deadline, request.now, request.rates)
    return choices


def seal_order(spec: JobSpec) -> SealOrder:
    """How to seal the dataset of a job: its limits, and the columns that the plan needs."""
    names: dict[str, tuple[int, int]] = {}
    known = {target: at for at, target in enumerate(targets(spec.models))}
    if len(known) > TARGETS_MAX:
        raise InvalidInput(
            f"the job has {len(known):,} models and adapters, and can tell {TARGETS_MAX:,} apart: name fewer models, "
            "or use a key that may use fewer",
            code="too_many_models",
        )
    for number, model in enumerate(spec.models):
        for name, adapter in model.targets().items():
            if model.allowed is None and not spec.default_model and name == model.source != model.name:
                continue  # a server's callers know its models by their names
            place = number, known[number, adapter]
            if names.setdefault(name, place) != place:
                raise InvalidInput(f"two models of this job are called {name!r}: rename one", code="ambiguous_model")
    paths = [paths_of(model) for model in spec.models]
    output = written_name(spec.output, spec.output_format)
    return SealOrder(
        dataset=spec.dataset,
        form=spec.form if spec.form.schema is not None or _has_prompt(spec) else None,
        targets=names,
        bases=[known[number, None] for number in range(len(spec.models))],
        patterns=[
            (pattern, number, known[number, None])
            for number, model in enumerate(spec.models)
            for pattern in model.adapter_patterns
        ],
        default=(0, 0) if spec.default_model and spec.models[0].name in names else None,
        endpoint=spec.endpoint,
        rows_max=spec.rows_max,
        services=[number for number, model in enumerate(spec.models) if not model.traits.is_local],
        features=[None if spec.origin is None else sorted(features_of(model)) for model in spec.models],
        any_path_models=[number for number, known in enumerate(paths) if known is None],
        urls=[
            None if model.takes_columns else frozenset(URLS) if known is None else known
            for model, known in zip(spec.models, paths, strict=True)
        ],
        keys=needs_keys(spec),
        requests=stores_requests(spec),
        columns_max=None if output_kind(output)[0] == "jsonl" else COLUMNS_MAX,
        may_be_columnar=may_be_columnar(spec),
        fold="all" if spec.policy.dedupe else "deterministic" if calls_language_models(spec.models) else "none",
    )


def plan_order(spec: JobSpec, rows: int, *, is_columnar: bool = False) -> PlanOrder:
    """How to order and cut the rows."""
    return PlanOrder(
        targets=targets(spec.models),
        shard_rows=[plan.shard_rows(model, rows, is_columnar=is_columnar) for model in spec.models],
        keys=needs_keys(spec),
        file_order=[number for number, model in enumerate(spec.models) if not model.traits.groups_prefixes],
        prompt_bytes=len((spec.form.prompt or "").encode()) if isinstance(spec.form, TableForm) else 0,
    )


def needs_keys(spec: JobSpec) -> bool:
    """Whether rows are ordered or folded: functions keep the file's order."""
    return spec.policy.dedupe or reuses(spec) or len(spec.models) > 1 or calls_language_models(spec.models)


def reuses(spec: JobSpec) -> bool:
    """Whether rows may take over results of earlier jobs."""
    return spec.policy.reuse not in (NONE, None)


def stays_in_memory(spec: JobSpec) -> bool:
    """Whether sealing and planning write nothing but the index and the plan of a small job.

    Else they convert, copy or fetch rows, or other processes read what they write.
    """
    dataset = spec.dataset
    has_additions = isinstance(spec.form, TableForm) and spec.form.has_additions
    writes_more = has_additions or dataset.copy or dataset.media_copies or any(map(is_fetched, dataset.paths))
    return spec.is_small and not (writes_more or reuses(spec))


def stores_requests(spec: JobSpec) -> bool:
    """Whether the digests of requests are kept: for this job, or for later ones that want what models answered."""
    has_calls_alone = not any(model.takes_columns for model in spec.models)
    return reuses(spec) or (has_calls_alone and not spec.is_small)


def stays_reusable(spec: JobSpec) -> bool:
    """Whether results can be reused as long as the project allows: those that were asked for with reuse, or of models
    that cost calls or are declared deterministic. A function of one's own runs again for less than keeping costs."""
    return reuses(spec) or any(is_deterministic(model) or not _is_own_code(model) for model in spec.models)


def _is_own_code(model: ModelSpec) -> bool:
    return all(map(_is_own_code, model.routes)) if model.needs_route else model.traits.runs_user_code


def may_be_columnar(spec: JobSpec) -> bool:
    """Whether every row is arguments of one function, and runs in the order of the file."""
    return not (needs_keys(spec) or _has_prompt(spec) or spec.models[0].needs_route)


def _has_prompt(spec: JobSpec) -> bool:
    return isinstance(spec.form, TableForm) and spec.form.makes_requests


def _has_only_faults(spec: JobSpec, dataset: Folder, report: SealReport) -> bool:
    """Whether all that is wrong are prompts and media of single rows: those are errors, and the others run."""
    form = spec.form
    if not isinstance(form, TableForm) or not form.has_additions or report.rejected == report.seal.rows:
        return False
    return all(refused.code in ROW_FAULTS for refused in plan.iter_rejected(dataset))


def calls_language_models(models: list[ModelSpec]) -> bool:
    return any(not model.takes_columns for model in models)


def listed(problems: list[Problem]) -> bytes:
    return msgspec.json.encode(problems)


# -- a retry -----------------------------------------------------------------------------------------------------------
