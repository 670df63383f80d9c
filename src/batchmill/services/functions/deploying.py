"""Where versions of functions are made: a staging folder, an environment, a trial, and the folder that keeps them.

Everything lies below `DATA_DIR/models`: `versions/NAME/BRANCH/NUMBER` has the code and what was printed while it was
made. A staging folder is of no use after the process that made it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchmill.config import LIMITS_MAX, WORKERS_MAX
from batchmill.errors import Forbidden, InvalidInput, ModelFailed
from batchmill.function_runtime.marks import BATCH_ROWS_MAX
from batchmill.models.environments import FOLDER, Environments
from batchmill.models.function_child import FunctionChild
from batchmill.models.installers import packages_of
from batchmill.models.redaction import mask_known
from batchmill.models.secrets import NAME, Secret, resolve
from batchmill.ports import Provisions
from batchmill.services.functions.names import folder_of
from batchmill.services.functions.records import FAILED
from batchmill.types import FunctionSpec, Interface, Isolation, Limits, ModelSpec, Tensor
from batchmill.types.engine_traits import FUNCTION_PROCESS
from batchmill.types.isolation import FunctionsEntry
from batchmill.wire import bundles
from batchmill.wire.bundles import EXAMPLES_MAX, REQUIREMENTS_CHARS_MAX, DeployOrder, ModelVersion
from batchmill.wire.calls import NAMED, POSITIONAL

SENT = "deploy-"  # how the archives begin that commands leave for the owner of the data directory
LOG, ORDER, LOCK, TRIAL = "deploy.log", "deploy.json", "requirements.lock", "trial"
LOG_BYTES_MAX = 256 * 1024  # of what is shown
BATCH_WINDOW_S_MAX = 60.0
GPUS_MAX = 64
VARIABLES_MAX = 1000
PEOPLES = {"source", "name", "branch", "examples", "has_samples"}  # fields that do not change what is called, or how


class Staged(Struct, frozen=True):
    """An archive that was unpacked. Nothing refers to it yet."""

    folder: Path
    order: DeployOrder
    digest: str  # of the code, the settings and the lock
    lock: str | None = None  # None: no requirements, or `error`
    error: ModelFailed | None = None  # why the requirements cannot be resolved


class Trial(Protocol):
    """Starts a version in a process of its own, calls it with its examples, and ends it."""

    async def __call__(self, spec: ModelSpec, home: Path, order: DeployOrder) -> Interface:
        """What the function takes and returns. Raises: ModelFailed, with its traceback."""


class VersionBuilder:
    def __init__(
        self, data_dir: Path, trial: Trial, entry: FunctionsEntry = FunctionsEntry(), isolation: Isolation | None = None
    ) -> None:
        """Args: isolation: what `entry` asks for, in which packages are installed."""
        self._data_dir, self._entry = data_dir, entry
        self._folder = data_dir / "models" / "versions"
        self._staging = data_dir / "models" / "staging"
        self._environments = Environments(data_dir / FOLDER, isolation)
        self._trial = trial

    def folder(self, version: ModelVersion) -> Path:
        return self._folder / version.name / folder_of(version.branch) / str(version.number)

    def incoming(self) -> Path:
        """An empty file, in the folder that a start of ours empties."""
        self._staging.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, path = tempfile.mkstemp(dir=self._staging, suffix=".tar.gz")
        os.close(handle)
        return Path(path)

    async def stage(self, bundle: Path) -> Staged:
        """Unpack an archive. Raises: InvalidInput for its content."""
        self._staging.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = Path(tempfile.mkdtemp(dir=self._staging))
        try:
            return await asyncio.to_thread(_stage, bundle, folder)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise

    async def resolve(self, staged: Staged) -> Staged:
        """Resolve the requirements, so that newer packages of the same requirements make a new version.

        A failure belongs to the version: `build` raises it. Raises: InvalidInput for requirements and interpreters.
        """
        order = staged.order
        try:
            lock = await self._environments.lock(order.python, order.requirements, staged.folder / LOG)
        except ModelFailed as error:
            return replace(staged, error=error)
        digest = hashlib.sha256(f"{staged.digest}\n{lock}".encode()).hexdigest()
        return staged if lock is None else replace(staged, lock=lock, digest=digest)

    def check_asked(self, order: DeployOrder) -> None:
        """Refuse what a key may not ask for where functions are isolated: it would lead out. Raises: Forbidden."""
        entry = self._entry
        if not entry.is_isolated:
            return
        if order.python is not None and "/" in order.python and order.python not in entry.pythons:
            raise Forbidden(
                f"the interpreter {order.python[:80]} is not for keys to name: functions are isolated; say a version "
                "such as 3.11, or have it added to functions.pythons"
            )
        for name, reference in order.secrets.items():
            if not any(fnmatchcase(reference, pattern) for pattern in entry.secrets):
                raise Forbidden(
                    f"the secret {name[:80]} refers to what keys may not name: functions are isolated; have "
                    f"{reference[:80]!r} added to functions.secrets"
                )

    async def build(self, staged: Staged, version: ModelVersion) -> ModelSpec:
        """The version's folder, environment and interface, the function having been called with its examples.

        Raises: ModelFailed (`deploy_failed`), with the traceback or the installer's output.
        """
        home = self.folder(version)
        await asyncio.to_thread(_settle, staged, home)
        order = staged.order
        try:
            if staged.error is not None:
                raise staged.error
            python = await self._environments.python(order.python, staged.lock, home / LOG)
            spec = spec_of(order, version, folder=home / bundles.CODE, digest=staged.digest, python=python)
            interface = await self._trial(spec, home / TRIAL, order)
        except ModelFailed as error:
            raise ModelFailed(error.message, code="deploy_failed") from None
        finally:
            await asyncio.to_thread(_gather_log, home)
        assert spec.function is not None
        packages = [] if staged.lock is None else packages_of(staged.lock)
        return replace(spec, function=replace(spec.function, interface=interface, packages=packages))

    async def copy(self, found: ModelVersion, version: ModelVersion) -> ModelSpec:
        """The same code and packages under another number, without a trial. A missing environment is built again.

        Raises: ModelFailed (`deploy_failed`).
        """
        home = self.folder(version)
        await asyncio.to_thread(shutil.copytree, self.folder(found), home)
        assert found.spec is not None and found.spec.function is not None, "only what is ready is copied"
        shown_version = f"{version.branch}/{version.number}"
        function = replace(found.spec.function, version=shown_version, folder=str(home / bundles.CODE))
        spec = replace(found.spec, function=function)
        order, lock = await asyncio.to_thread(_read_order, home)
        try:
            return replace(spec, python=await self._environments.python(order.python, lock, home / LOG))
        except ModelFailed as error:
            raise ModelFailed(error.message, code="deploy_failed") from None

    def log(self, version: ModelVersion) -> str:
        """The end of what was printed while a version was made, and why it failed."""
        error_line = f"{version.error}\n" if version.error else ""
        try:
            with (self.folder(version) / LOG).open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - LOG_BYTES_MAX))
                return file.read().decode(errors="replace") + error_line
        except FileNotFoundError:
            return error_line

    def discard_code(self, version: ModelVersion) -> None:
        """A version that failed keeps only what was printed."""
        shutil.rmtree(self.folder(version) / bundles.CODE, ignore_errors=True)

    def discard(self, version: ModelVersion) -> None:
        shutil.rmtree(self.folder(version), ignore_errors=True)

    def sweep(self, keep: Collection[ModelVersion]) -> None:
        """Remove what an owner that died left behind. No other process writes here."""
        shutil.rmtree(self._staging, ignore_errors=True)
        for sent in self._data_dir.glob(f"{SENT}*"):
            _remove_unlocked(sent)
        self._environments.sweep({each.spec.python for each in keep if each.spec is not None and each.spec.python})
        known = {self.folder(version): version for version in keep}
        for folder in self._folder.glob("*/*/*"):
            if folder not in known:
                shutil.rmtree(folder, ignore_errors=True)
            elif known[folder].state == FAILED:
                _gather_log(folder)
                self.discard_code(known[folder])


@contextlib.contextmanager
def sent_archive(data_dir: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A file for an archive that the owner of the data directory reads, locked for as long as its command lives."""
    while True:
        handle, name = tempfile.mkstemp(prefix=SENT, suffix=".tar.gz", dir=data_dir)
        with open(handle, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink == 0:
                continue  # an owner that opened meanwhile removed it before it was locked
            try:
                yield Path(name), file
            finally:
                Path(name).unlink(missing_ok=True)
        return


def _remove_unlocked(sent: Path) -> None:
    """Remove an archive whose command was killed: a command that lives holds its lock."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError), sent.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        sent.unlink()


def _stage(bundle: Path, folder: Path) -> Staged:
    code = folder / bundles.CODE
    code.mkdir()
    try:
        with bundle.open("rb") as file:
            order = bundles.read(file, code)
    except OSError as error:
        raise InvalidInput(f"the bundle cannot be unpacked: {error.strerror}", code="invalid_bundle") from None
    check(order, code)
    settings = {name: value for name, value in msgspec.to_builtins(order).items() if name not in PEOPLES}
    data = msgspec.json.encode([bundles.digest(code), settings], order="deterministic")
    return Staged(folder, order, hashlib.sha256(data).hexdigest())


def _settle(staged: Staged, home: Path) -> None:
    """Give the code the folder in which it stays."""
    home.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    shutil.rmtree(home, ignore_errors=True)  # of a number that was taken and never written down
    home.mkdir(mode=0o700)
    (home / ORDER).write_bytes(msgspec.json.encode(staged.order))
    if staged.lock is not None:
        (home / LOCK).write_text(staged.lock)
    if (staged.folder / LOG).exists():
        (staged.folder / LOG).rename(home / LOG)
    (staged.folder / bundles.CODE).rename(home / bundles.CODE)


def _read_order(home: Path) -> tuple[DeployOrder, str | None]:
    """The order of a version and its lock; None if it has no requirements."""
    order = msgspec.json.decode((home / ORDER).read_bytes(), type=DeployOrder)
    return order, (home / LOCK).read_text() if order.requirements is not None else None


def _gather_log(home: Path) -> None:
    """Append the output of the trial to that of the installer."""
    with (home / LOG).open("ab") as out:
        for path in sorted((home / TRIAL).glob("*.log")):
            out.write(path.read_bytes()[-LOG_BYTES_MAX:])
    shutil.rmtree(home / TRIAL, ignore_errors=True)


def spec_of(order: DeployOrder, version: ModelVersion, *, folder: Path, digest: str, python: str | None) -> ModelSpec:
    """The model that an order describes, its interface not known yet."""
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
        limits=limits, function=function,
    )  # fmt: skip


def check(order: DeployOrder, code: Path) -> None:
    """Raises: InvalidInput for an order that no function could be called by."""
    file, colon, attribute = order.target.partition(":")
    if not colon or not attribute or not (code / bundles.check_place(file)).is_file():
        raise InvalidInput(f"{order.target!r} is not in the code: it is given as FILE.py:NAME", code="unknown_function")
    ranges = (
        ("workers", order.workers, 1, WORKERS_MAX),
        ("gpus", order.gpus, 0, GPUS_MAX),
        ("batch_size", order.batch_size, 0, BATCH_ROWS_MAX),
        ("batch_window_s", order.batch_window_s, 0, BATCH_WINDOW_S_MAX),
        ("memory_bytes", order.memory_bytes, 1, LIMITS_MAX["memory_bytes"]),
        ("timeout_s", order.timeout_s, 1e-3, LIMITS_MAX["attempt_timeout_s"]),
        ("examples", len(order.examples), 0, EXAMPLES_MAX),
        ("variables", len(order.environment) + len(order.secrets), 0, VARIABLES_MAX),
        ("requirements", len(order.requirements or ""), 0, REQUIREMENTS_CHARS_MAX),
    )
    for name, value, least, most in ranges:
        if value is not None and not least <= value <= most:
            raise InvalidInput(f"{name} must be {least:g} to {most:,}, not {value}", code="invalid_order")
    _check_variables(order)


def _check_variables(order: DeployOrder) -> None:
    for name, value in (*order.environment.items(), *order.secrets.items()):
        if not name.isidentifier() or not name.isascii() or "\0" in value:
            raise InvalidInput(f"{name[:80]!r} is no name of an environment variable", code="invalid_variable")
    for name, reference in order.secrets.items():
        kind, _, place = reference.partition(":")
        is_kept = kind == "secret" and NAME.fullmatch(place)  # those of connectors are theirs alone
        if not is_kept and (kind not in ("env", "file") or not place):
            raise InvalidInput(  # the text may be the secret itself: it is not repeated
                f'the secret {name} is "env:NAME", "file:PATH" or "secret:NAME", never itself', code="invalid_secret"
            )
        if name in order.environment:
            raise InvalidInput(f"{name} is a variable and a secret: leave one out", code="invalid_variable")


class Trials:
    """A `deploying.Trial` whose functions are given the secrets that they name."""

    def __init__(self, provisions: Provisions) -> None:
        self._provisions = provisions

    async def __call__(self, spec: ModelSpec, home: Path, order: DeployOrder) -> Interface:
        provision = await self._provisions.of(spec)
        return await try_version(spec, home, order, given=provision.secrets, isolation=provision.isolation)


async def try_version(
    spec: ModelSpec, home: Path, order: DeployOrder, *, given: Mapping[str, str] = MappingProxyType({}),
    isolation: Isolation | None = None,
) -> Interface:  # fmt: skip
    """What the function takes and returns. Raises: ModelFailed, with the traceback of what does not work.

    Args:
        given: what each "secret:NAME" that it names stands for.
        isolation: in which it is tried, as it will run.
    """
    home.mkdir(parents=True, exist_ok=True)
    try:
        child = FunctionChild(
            spec, home, resolve=lambda name: Secret(given[name]) if name in given else resolve(name),
            isolation=isolation,
        )  # fmt: skip
        return await _try(child, spec, order)
    except ModelFailed as error:
        raise ModelFailed(mask_known(error.message), code=error.code) from None


async def _try(child: FunctionChild, spec: ModelSpec, order: DeployOrder) -> Interface:
    try:
        interface = await child.start()
        _check_batches(interface, spec)
        for number, example in enumerate([*order.examples, *_sample(interface, spec, order)], 1):
            await _call(child, number, example, spec)
        return interface
    finally:
        await child.stop()


def _check_batches(interface: Interface, spec: ModelSpec) -> None:
    """Raises: ModelFailed for settings that would have no effect."""
    function = spec.function
    assert function is not None, "it is being deployed"
    if interface.calls == "row" and (function.batch_size > 1 or function.batch_window_s):
        raise ModelFailed(
            f"{spec.source} takes one row at a time, so a batch size or window has no effect: let it take lists and "
            "mark it @batched(N) (an Inferless class has BATCH_SIZE), or leave them out"
        )
    if function.batch_size and function.batch_size != interface.batch_size:
        raise ModelFailed(
            f"the batch size is {function.batch_size:,}, and {spec.source} can be given {interface.batch_size:,} rows "
            "at most"
        )


async def _call(child: FunctionChild, number: int, example: Any, spec: ModelSpec) -> None:
    answer: asyncio.Future[tuple[dict[str, Any], list[bytes]]] = asyncio.get_running_loop().create_future()

    def on_frames(come: list[Any]) -> None:
        for meta, buffers in come:
            if meta["kind"] == "results" and meta["id"] == number and not answer.done():
                answer.set_result((meta, buffers))

    def end() -> None:
        if not answer.done():
            answer.set_exception(ModelFailed(f"the example ended the process: {child.last_words()}"))

    child.on_frames, child.ended = on_frames, end
    layout = POSITIONAL if isinstance(example, list) else NAMED
    asked = {"kind": "ask", "id": number, "rows": 1, "layout": layout, "train": False, "exact": False}
    child.send(asked, [msgspec.json.encode([example])])
    limit_s = spec.limits.attempt_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            meta, _ = await answer
    except TimeoutError:
        raise ModelFailed(f"the example {_shown(example)} had no answer after {limit_s:g} s") from None
    if meta["errors"]:
        code, message, trace = next(iter(meta["errors"].values()))
        failure = trace.rstrip() or f"{code}: {message}"
        raise ModelFailed(f"the example {_shown(example)} was refused:\n{failure}")


def _sample(interface: Interface, spec: ModelSpec, order: DeployOrder) -> list[Any]:
    """The call that the deprecated sample input shows; none where there is none. The process checks what comes back."""
    assert spec.function is not None
    if order.has_samples and interface.takes != "dict":
        raise ModelFailed(
            f"{spec.source} is no InferlessPythonModel: input.json and output.json describe only such a class; leave "
            "them out, or give --example"
        )
    place = Path(spec.function.folder, spec.source.partition(":")[0]).parent
    if interface.takes != "dict" or not (place / "input.json").is_file():
        return []
    return [{tensor.name: _value(tensor) for tensor in interface.inputs if tensor.example is not None}]


def _value(tensor: Tensor) -> Any:
    is_single = tensor.shape == [1] and isinstance(tensor.example, list) and len(tensor.example) == 1
    return tensor.example[0] if is_single else tensor.example


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode(errors="replace")
    return text if len(text) <= 200 else f"{text[:199]}…"
