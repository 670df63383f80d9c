"""Builds versions of functions: staging folder, environment, trial calls, version folder.

All files are below `DATA_DIR/models`. `versions/NAME/BRANCH/NUMBER` has the code and the output of the build. A staging
folder is useless after the process that created it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchmill.config import LIMITS_MAX, WORKERS_MAX
from batchmill.errors import Forbidden, InvalidInput, ModelFailed, TermOver
from batchmill.function_runtime.marks import BATCH_ROWS_MAX
from batchmill.models.environments import FOLDER, LOCK, ORDER, Environments, read_requested
from batchmill.models.function_child import FunctionChild
from batchmill.models.installers import packages_of
from batchmill.models.redaction import mask_known, without_userinfo
from batchmill.models.secrets import NAME, Secret, resolve
from batchmill.owned_files import OwnedFiles, discard
from batchmill.part_files import make_folder, sync_tree
from batchmill.ports.executors import Provisions
from batchmill.services.functions.names import folder_of
from batchmill.services.functions.records import FAILED
from batchmill.services.functions.schema_classes import load_class
from batchmill.services.functions.sent_archives import sweep_archives
from batchmill.store.stored_files import LocalFiles, StoredFiles, using
from batchmill.types import FunctionSpec, Interface, Isolation, Limits, ModelSpec, Tensor
from batchmill.types.engine_traits import FUNCTION_PROCESS
from batchmill.types.isolation import FunctionsEntry
from batchmill.wire import bundles
from batchmill.wire.bundles import EXAMPLES_MAX, REQUIREMENTS_CHARS_MAX, SCHEMA, DeployOrder, ModelVersion
from batchmill.wire.calls import NAMED, POSITIONAL

HOLDER = "functions"  # of the code that workers may run: it stays until this process ends
LOG, TRIAL = "deploy.log", "trial"
LOG_BYTES_MAX = 256 * 1024  # bytes of the log that are shown
BATCH_WINDOW_S_MAX = 60.0
GPUS_MAX = 64
VARIABLES_MAX = 1000
# Fields that do not change how the function runs: the digest leaves them out.
DISPLAY_FIELDS = {"source", "name", "branch", "examples", "has_samples"}


class Staged(Struct, frozen=True):
    """An unpacked archive. Nothing refers to it yet."""

    folder: Path
    order: DeployOrder
    digest: str  # of the code, the settings and the lock
    lock: str | None = None  # None: no requirements, or `error`
    error: ModelFailed | None = None  # why the requirements cannot be resolved


class Trial(Protocol):
    """Starts a version in its own process, calls it with its examples, and ends it."""

    async def __call__(self, spec: ModelSpec, home: Path, order: DeployOrder) -> Interface:
        """Returns the function's inputs and outputs. Raises: ModelFailed, with the function's traceback."""


class VersionBuilder:
    def __init__(
        self, data_dir: Path, trial: Trial, entry: FunctionsEntry = FunctionsEntry(),
        isolation: Isolation | None = None, stored: StoredFiles = LocalFiles(),
        owned: OwnedFiles = OwnedFiles(),
    ) -> None:  # fmt: skip
        """Args:
        isolation: the sandbox of packages that are installed and of classes, as `entry` configures it.
        owned: another owner may have a version of the same number, and an environment of the same packages.
        """
        self._data_dir, self._entry, self._stored = data_dir, entry, stored
        self._folder = data_dir / "models" / "versions"
        self._staging = data_dir / "models" / "staging"
        self._environments, self._isolation = Environments(data_dir / FOLDER, isolation, owned), isolation
        self._trial, self._owned = trial, owned

    def folder(self, version: ModelVersion) -> Path:
        return self._folder / version.name / folder_of(version.branch) / str(version.number)

    def incoming(self) -> Path:
        """Create an empty file in the staging folder, which `sweep` empties at the next start."""
        make_folder(self._staging)
        handle, path = tempfile.mkstemp(dir=self._staging, suffix=".tar.gz")
        os.close(handle)
        return Path(path)

    async def stage(self, bundle: Path) -> Staged:
        """Unpack an archive. Raises: InvalidInput for invalid content."""
        make_folder(self._staging)
        folder = Path(tempfile.mkdtemp(dir=self._staging))
        try:
            return await asyncio.to_thread(_stage, bundle, folder)
        except BaseException:
            await asyncio.to_thread(discard, folder)
            raise

    async def resolve(self, staged: Staged) -> Staged:
        """Resolve the requirements to a lock, so that newer packages for the same requirements make a new version.

        `build` raises the error of a failed resolution, so that the version records it. Raises: InvalidInput for
        invalid requirements and interpreters.
        """
        order = staged.order
        try:
            lock = await self._environments.lock(order.python, order.requirements, staged.folder / LOG)
        except ModelFailed as failure:
            return replace(staged, error=failure)
        digest = hashlib.sha256(f"{staged.digest}\n{lock}".encode()).hexdigest()
        return staged if lock is None else replace(staged, lock=lock, digest=digest)

    def check_allowed(self, order: DeployOrder) -> None:
        """Refuse settings of a keyed caller that would break out of the isolation. Raises: Forbidden."""
        policy = self._entry
        if not policy.is_isolated:
            return
        if order.python is not None and "/" in order.python and order.python not in policy.pythons:
            raise Forbidden(
                f"a key may not choose the interpreter {order.python[:80]}, because functions are isolated; give a "
                "version such as 3.11, or have the path added to functions.pythons"
            )
        for name, reference in order.secrets.items():
            if not any(fnmatchcase(reference, pattern) for pattern in policy.secrets):
                raise Forbidden(
                    f"the secret {name[:80]} has a reference that keys may not use, because functions are isolated; "
                    f"have {reference[:80]!r} added to functions.secrets"
                )

    async def build(self, staged: Staged, version: ModelVersion) -> ModelSpec:
        """Create the version's folder and environment, and call the function with its examples to find its interface.

        Raises: ModelFailed (`deploy_failed`), with the traceback or the installer's output.
        """
        home = self.folder(version)
        await asyncio.to_thread(_move_into_place, staged, home, self._owned)
        order = staged.order
        try:
            if staged.error is not None:
                raise staged.error
            python = await self._environments.python(order.python, staged.lock, home / LOG)
            spec = spec_of(order, version, folder=home / bundles.CODE, digest=staged.digest, python=python)
            if order.kind == SCHEMA:
                schema, interface = await load_class(spec, self._isolation), Interface()
            else:
                schema, interface = None, await self._trial(spec, home / TRIAL, order)
        except ModelFailed as error:
            raise ModelFailed(error.message, code="deploy_failed") from None
        finally:
            await asyncio.to_thread(_gather_log, home, self._owned)
        await asyncio.to_thread(sync_tree, home)
        await self._stored.publish(home)
        assert spec.function is not None
        packages = [] if staged.lock is None else packages_of(staged.lock)
        return replace(spec, function=replace(spec.function, interface=interface, packages=packages, schema=schema))

    async def copy(self, source: ModelVersion, version: ModelVersion) -> ModelSpec:
        """Copy a version's code and packages to another number, without a trial. A missing environment is rebuilt.

        Raises: ModelFailed (`deploy_failed`).
        """
        home = self.folder(version)
        async with using(self._stored, self.folder(source)):
            await asyncio.to_thread(self._owned.copy_tree, self.folder(source), home)
        await asyncio.to_thread(sync_tree, home)
        await self._stored.publish(home)
        assert source.spec is not None and source.spec.function is not None, "only ready versions are copied"
        version_label = f"{version.branch}/{version.number}"
        function = replace(source.spec.function, version=version_label, folder=str(home / bundles.CODE))
        spec = replace(source.spec, function=function)
        python, lock = await asyncio.to_thread(read_requested, home)
        try:
            return replace(spec, python=await self._environments.python(python, lock, home / LOG))
        except ModelFailed as error:
            raise ModelFailed(error.message, code="deploy_failed") from None

    async def restore(self, model: ModelSpec) -> None:
        """Bring the code of a version, and build its environment again, where an owner elsewhere made them.

        Raises: ModelFailed with the installer's output.
        """
        if not self._stored.is_elsewhere or model.function is None or not model.function.folder:
            return
        home = Path(model.function.folder).parent
        await self._stored.fetch(home, holder=HOLDER)
        if model.python is not None and (home / ORDER).exists():
            python, lock = await asyncio.to_thread(read_requested, home)
            await self._environments.restore(model.python, python, lock, home / LOG)

    async def discard_failed(self, version: ModelVersion) -> None:
        """Keep only the log of a version that failed."""
        await asyncio.to_thread(self.discard_code, version)
        await self._stored.publish(self.folder(version))

    async def log(self, version: ModelVersion) -> str:
        """As `read_log`, of a version that an owner elsewhere may have made."""
        async with using(self._stored, self.folder(version)):
            return await asyncio.to_thread(self.read_log, version)

    def read_log(self, version: ModelVersion) -> str:
        """The end of the output of a version's build, followed by the error if it failed."""
        error_line = f"{version.error}\n" if version.error else ""
        try:
            with (self.folder(version) / LOG).open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - LOG_BYTES_MAX))
                return without_userinfo(file.read().decode(errors="replace")) + error_line
        except FileNotFoundError:
            return error_line

    def discard_code(self, version: ModelVersion) -> None:
        """Delete the code of a failed version. Its log stays. Another owner may have a version of this number."""
        with contextlib.suppress(TermOver):
            self._owned.remove_tree(self.folder(version) / bundles.CODE)

    async def discard(self, version: ModelVersion) -> None:
        """Delete the folder of a version that is not stored. Another owner may have a version of this number."""
        try:
            await asyncio.to_thread(self._owned.remove_tree, self.folder(version))
        except TermOver:
            return
        await self._stored.remove(self.folder(version))

    def sweep(self, keep: Collection[ModelVersion]) -> None:
        """Remove what a crashed owner left behind.

        Raises: TermOver where another process may be the owner, of versions that are not in `keep`.
        """
        self._owned.remove_tree(self._staging)
        sweep_archives(self._data_dir)
        self._environments.sweep({each.spec.python for each in keep if each.spec is not None and each.spec.python})
        folders = {self.folder(version): version for version in keep}
        for folder in self._folder.glob("*/*/*"):
            if folder not in folders:
                self._owned.remove_tree(folder)
            elif folders[folder].state == FAILED:
                _gather_log(folder, self._owned)
                self.discard_code(folders[folder])


def _stage(bundle: Path, folder: Path) -> Staged:
    code = folder / bundles.CODE
    code.mkdir()
    try:
        with bundle.open("rb") as file:
            order = bundles.read(file, code)
    except OSError as error:
        raise InvalidInput(f"the bundle cannot be unpacked: {error.strerror}", code="invalid_bundle") from None
    check(order, code)
    settings = {name: value for name, value in msgspec.to_builtins(order).items() if name not in DISPLAY_FIELDS}
    data = msgspec.json.encode([bundles.digest(code), settings], order="deterministic")
    return Staged(folder, order, hashlib.sha256(data).hexdigest())


def _move_into_place(staged: Staged, home: Path, owned: OwnedFiles) -> None:
    """Move the code, the log and the lock from the staging folder to the version's folder.

    Raises: TermOver where another owner may have a version of this number.
    """
    owned.remove_tree(home)  # of a number whose version was not committed
    owned.make_folder(home, is_new=True)
    owned.create(home / ORDER, msgspec.json.encode(staged.order))
    if staged.lock is not None:
        owned.create(home / LOCK, staged.lock.encode())
    if (staged.folder / LOG).exists():
        owned.move(staged.folder / LOG, home / LOG)
    owned.move(staged.folder / bundles.CODE, home / bundles.CODE)


def _gather_log(home: Path, owned: OwnedFiles) -> None:
    """Append the output of the trial to that of the installer. Another owner may be at a trial of this number."""
    with contextlib.suppress(TermOver):
        owned.term.check()
        with (home / LOG).open("ab") as out:
            for path in sorted((home / TRIAL).glob("*.log")):
                out.write(path.read_bytes()[-LOG_BYTES_MAX:])
        owned.remove_tree(home / TRIAL)


def spec_of(order: DeployOrder, version: ModelVersion, *, folder: Path, digest: str, python: str | None) -> ModelSpec:
    """The model spec for a deploy order, still without the interface."""
    limits = Limits(memory_bytes=order.memory_bytes)
    if order.timeout_s is not None:
        limits = replace(limits, attempt_timeout_s=order.timeout_s)
    function = FunctionSpec(
        version=f"{version.branch}/{version.number}",
        folder=str(folder),
        digest=digest,
        batch_size=order.batch_size,
        batch_window_s=order.batch_window_s,
        frame_columns=order.frame_columns,
        is_idempotent=order.is_idempotent,
        environment=order.environment,
        secrets=order.secrets,
        gpus=order.gpus,
        received_shapes=order.received_shapes,
    )
    return ModelSpec(
        name=order.name, engine=FUNCTION_PROCESS, source=order.target, python=python, workers=order.workers,
        limits=limits, function=function, is_deterministic=order.is_deterministic,
    )  # fmt: skip


def check(order: DeployOrder, code: Path) -> None:
    """Check the settings of a deploy order and that its target file exists. Raises: InvalidInput."""
    path, colon, attribute = order.target.partition(":")
    if not colon or not attribute or not (code / bundles.check_path(path)).is_file():
        raise InvalidInput(f"{order.target!r} is not in the code: give it as FILE.py:NAME", code="unknown_function")
    ranges = (
        ("workers", order.workers, 1, WORKERS_MAX),
        ("gpus", order.gpus, 0, GPUS_MAX),
        ("batch_size", order.batch_size, 0, BATCH_ROWS_MAX),
        ("batch_window_s", order.batch_window_s or 0, 0, BATCH_WINDOW_S_MAX),
        ("memory_bytes", order.memory_bytes, 1, LIMITS_MAX["memory_bytes"]),
        ("timeout_s", order.timeout_s, 1e-3, LIMITS_MAX["attempt_timeout_s"]),
        ("examples", len(order.examples), 0, EXAMPLES_MAX),
        ("variables", len(order.environment) + len(order.secrets), 0, VARIABLES_MAX),
        ("requirements", len(order.requirements or ""), 0, REQUIREMENTS_CHARS_MAX),
    )
    for name, value, low, high in ranges:
        if value is not None and not low <= value <= high:
            raise InvalidInput(f"{name} must be {low:g} to {high:,}, not {value}", code="invalid_order")
    _check_variables(order)


def _check_variables(order: DeployOrder) -> None:
    for name, value in (*order.environment.items(), *order.secrets.items()):
        if not name.isidentifier() or not name.isascii() or "\0" in value:
            raise InvalidInput(f"{name[:80]!r} is not a name of an environment variable", code="invalid_variable")
    for name, reference in order.secrets.items():
        kind, _, location = reference.partition(":")
        is_stored = kind == "secret" and NAME.fullmatch(location)  # not the secrets of connectors
        if not is_stored and (kind not in ("env", "file") or not location):
            raise InvalidInput(  # without the reference, which may be the secret itself
                f'give the secret {name} as "env:NAME", "file:PATH" or "secret:NAME", never as its value',
                code="invalid_secret",
            )
        if name in order.environment:
            raise InvalidInput(f"{name} is both a variable and a secret: leave one out", code="invalid_variable")


class Trials:
    """A `Trial` that passes functions the secrets that they refer to."""

    def __init__(self, provisions: Provisions) -> None:
        self._provisions = provisions

    async def __call__(self, spec: ModelSpec, home: Path, order: DeployOrder) -> Interface:
        grants = await self._provisions.of(spec)
        return await try_version(spec, home, order, secrets=grants.secrets, isolation=grants.isolation)


async def try_version(
    spec: ModelSpec, home: Path, order: DeployOrder, *, secrets: Mapping[str, str] = MappingProxyType({}),
    isolation: Isolation | None = None,
) -> Interface:  # fmt: skip
    """Start the function, call it with its examples, and return its inputs and outputs.

    Args:
        secrets: the value of each "secret:NAME" that the function refers to.
        isolation: the same sandbox as in production.
    Raises: ModelFailed, with the traceback.
    """
    home.mkdir(parents=True, exist_ok=True)
    try:
        child = FunctionChild(
            spec, home, resolve=lambda name: Secret(secrets[name]) if name in secrets else resolve(name),
            isolation=isolation,
        )  # fmt: skip
        return await _try(child, spec, order)
    except ModelFailed as error:
        raise ModelFailed(mask_known(error.message), code=error.code) from None


async def _try(child: FunctionChild, spec: ModelSpec, order: DeployOrder) -> Interface:
    try:
        interface = await child.start()
        _check_batches(interface, spec)
        for id_, example in enumerate([*order.examples, *_sample_calls(interface, spec, order)], 1):
            await _call(child, id_, example, spec)
        return interface
    finally:
        await child.stop()


def _check_batches(interface: Interface, spec: ModelSpec) -> None:
    """Raises: ModelFailed for batch settings that would have no effect."""
    function = spec.function
    assert function is not None, "it is being deployed"
    if interface.calls == "row" and (function.batch_size > 1 or function.batch_window_s):
        raise ModelFailed(
            f"{spec.source} takes one row at a time, so a batch size or window has no effect: let it take lists and "
            "mark it @batched(N) (an Inferless class has BATCH_SIZE), or leave them out"
        )
    if function.batch_size and function.batch_size != interface.batch_size:
        raise ModelFailed(
            f"the batch size is {function.batch_size:,}, and {spec.source} takes {interface.batch_size:,} rows at most"
        )


async def _call(child: FunctionChild, id_: int, example: Any, spec: ModelSpec) -> None:
    result: asyncio.Future[tuple[dict[str, Any], list[bytes]]] = asyncio.get_running_loop().create_future()

    def on_frames(frames: list[Any]) -> None:
        for meta, buffers in frames:
            if meta["kind"] == "results" and meta["id"] == id_ and not result.done():
                result.set_result((meta, buffers))

    def end() -> None:
        if not result.done():
            result.set_exception(ModelFailed(f"the example ended the process: {child.exit_report()}"))

    child.on_frames, child.ended = on_frames, end
    layout = POSITIONAL if isinstance(example, list) else NAMED
    request = {
        "kind": "ask",
        "id": id_,
        "rows": 1,
        "layout": layout,
        "from_job": False,
        "staged": False,
        "exact": False,
    }
    child.send(request, [msgspec.json.encode([example])])
    limit_s = spec.limits.attempt_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            meta, _ = await result
    except TimeoutError:
        raise ModelFailed(f"the example {_preview(example)} returned nothing within {limit_s:g} s") from None
    if meta["errors"]:
        code, message, trace = next(iter(meta["errors"].values()))
        failure = trace.rstrip() or f"{code}: {message}"
        raise ModelFailed(f"the example {_preview(example)} failed:\n{failure}")


def _sample_calls(interface: Interface, spec: ModelSpec, order: DeployOrder) -> list[Any]:
    """The call that the deprecated `input.json` describes, or nothing without that file. The process checks the
    result."""
    assert spec.function is not None
    if order.has_samples and interface.takes != "dict":
        raise ModelFailed(
            f"{spec.source} is not an InferlessPythonModel: input.json and output.json describe only such a class; "
            "leave them out, or give --example"
        )
    folder = Path(spec.function.folder, spec.source.partition(":")[0]).parent
    if interface.takes != "dict" or not (folder / "input.json").is_file():
        return []
    return [{tensor.name: _example_value(tensor) for tensor in interface.inputs if tensor.example is not None}]


def _example_value(tensor: Tensor) -> Any:
    is_single = tensor.shape == [1] and isinstance(tensor.example, list) and len(tensor.example) == 1
    return tensor.example[0] if is_single else tensor.example


def _preview(value: Any) -> str:
    text = msgspec.json.encode(value).decode(errors="replace")
    return text if len(text) <= 200 else f"{text[:199]}…"
