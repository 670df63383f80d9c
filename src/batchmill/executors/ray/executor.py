"""Workers as Ray actors, started through a driver process: see `driver`. The owner imports no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchmill import __version__
from batchmill.children.process_end import boot_id, kill_session, started
from batchmill.errors import BatchmillError, Unavailable
from batchmill.executors.ray import frames
from batchmill.executors.ray.checks import OPEN_CLUSTER, checks
from batchmill.executors.ray.driver_flaws import find_flaw, silence_of
from batchmill.executors.ray.frames import (
    BEAT_S,
    LOST,
    Beat,
    Collect,
    Collected,
    Connect,
    Connected,
    Deliver,
    Exited,
    Inspect,
    Inspected,
    Item,
    Launch,
    NodeStore,
    Placement,
    TaskEnded,
    Waits,
    WorkerOrder,
)
from batchmill.executors.ray.ray_worker import RayWorker
from batchmill.executors.ray.shared_store import SharedStore, keep_left
from batchmill.executors.ray.tasks import RayTasks
from batchmill.models import redaction
from batchmill.models.worker_environment import MACHINE, chosen
from batchmill.object_store.credentials import on_nodes, settings_of
from batchmill.states import PauseReason
from batchmill.types import ModelSpec, Provision
from batchmill.types.cluster import Check, ClusterEntry, ClusterView, ClusterWorker
from batchmill.types.machines import gpus_by_flags
from batchmill.wire import messages
from batchmill.wire.messages import AnswerLive, Failed, Open, Provide, Start

RETRY_S, RETRY_MAX_S = 1.0, 30.0  # before the cluster is tried again; doubles with each failure
CPUS_DEFAULT = 1.0  # that a worker reserves
CONNECT_S = 90.0  # for a driver to reach the cluster, or to start a local one
DRIVER_PID, PROBE = "ray-driver.pid", "cluster-probe-"  # files that say which driver runs, and what nodes are to see
LEAVE_S = 10.0  # for a driver to end once its owner has closed its socket
INSPECT_S = 30.0
COLLECT_S = 90.0  # for a node to bring what a dead worker left: longer than the driver waits for it
COLLECTED_AT_ONCE = 16  # dead workers
UNSENT_BYTES = 256 * 1024 * 1024  # of all workers, that the driver has not read; then it is replaced
SILENT_BEATS = 15  # that the driver leaves out; then it is replaced
DRIVER_VARIABLES = (*MACHINE, "RAY_*", "CUDA_VISIBLE_DEVICES")
NO_SETUP = (
    "a node of the cluster cannot run batchmill's workers: {}; install the same version of Python and batchmill[ray] "
    "on every node as here ({}): `batchmill doctor` compares them"
)
OPEN_FUNCTIONS = (
    'functions of projects run on the nodes of a cluster only isolated: set functions.isolate = "bubblewrap"'
)


class RayExecutor:
    """
    Args:
        data_dir: the folder that all nodes see, unless there is a store.
        store: the object store that holds what it holds; None: there is none.
        beat_s: the time between two looks whether the driver still beats.
        environment: returns the variables of this machine that a worker of a model gets on its node.
        is_served: the owner is a server, whose projects do not trust one another.
    """

    def __init__(
        self, entry: ClusterEntry, data_dir: Path, environment: Callable[[ModelSpec], dict[str, str]], *,
        store: SharedStore | None = None, is_served: bool = False, beat_s: float = BEAT_S,
    ) -> None:  # fmt: skip
        self._store = store
        self.tasks = None if store is None else RayTasks(self, store)
        self._collections: dict[int, asyncio.Future[Collected]] = {}  # worker -> what it left
        self._collecting = asyncio.Semaphore(COLLECTED_AT_ONCE)
        self._endings: set[asyncio.Task[None]] = set()
        self._beat_s = beat_s
        self._events = 0  # of the driver
        self._flaw = ""  # why the driver was replaced
        self._entry, self._data_dir, self._environment, self._is_served = entry, data_dir, environment, is_served
        self._folder = data_dir / "workers"
        self._numbers = itertools.count(1)
        self._workers: dict[int, RayWorker] = {}
        self._inspections: dict[int, asyncio.Future[Inspected]] = {}
        self._driving: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self.connected: Connected | None = None
        self.why = ""  # the cluster cannot be reached
        self._changed = asyncio.Event()  # connected, or failed to
        self._probe_text, self._driver = uuid.uuid4().hex, ""
        self._probe = self._folder / f"{PROBE}{self._probe_text}"  # another owner's is another file

    # -- ports.executors.Executor -------------------------------------------------------------------------------------

    async def start(self, start: Start) -> RayWorker:
        """A worker that is placed as soon as the cluster has room for it."""
        model = start.model
        gpus = (model.function.gpus if model.function is not None else 0) or model.needs.gpus
        takes_more = model.traits.takes_gpus and not gpus
        cpus = CPUS_DEFAULT if model.needs.cpus is None else model.needs.cpus
        placement = Placement(
            cpus, None if takes_more else gpus, gpus_by_flags(model.engine_args) if takes_more else 0,
            model.needs.memory_bytes, model.needs.resources,
        )  # fmt: skip
        if self._store is None:
            await asyncio.to_thread(self._write_probe)
        Path(start.home).mkdir(parents=True, exist_ok=True)
        worker = RayWorker(next(self._numbers), start, placement, self)
        self._workers[worker.number] = worker
        self._drive()
        if self.connected is None:
            worker.waits = self.why or f"the Ray cluster {self._entry.address!r} is being reached"
        else:
            self._launch(worker)
        return worker

    def sweep(self) -> None:
        """Kill the driver of a dead owner: Ray ends its actors with it."""
        for probe in self._folder.glob(f"{PROBE}*"):
            probe.unlink(missing_ok=True)
        file = self._folder / DRIVER_PID
        with contextlib.suppress(FileNotFoundError):
            match file.read_text().split():
                case [pid, begun, boot] if boot == boot_id() and started(int(pid)) in (begun, ""):
                    kill_session(int(pid))
            file.unlink()

    def _write_probe(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._probe.exists() or self._probe.read_text() != self._probe_text:
            self._probe.write_text(self._probe_text)

    # -- the cluster --------------------------------------------------------------------------------------------------

    @property
    def may_send_secrets(self) -> bool:
        """The cluster keeps others out, or the user answers for its network."""
        if self.connected is None:
            return False
        is_closed = self.connected.is_local or (self.connected.demands_token and self.connected.has_tls)
        return is_closed or self._entry.trusted_network

    async def reach(self) -> None:
        """Return once the cluster is reached. Raises: Unavailable, at once if the last try has failed; TimeoutError."""
        self._drive()
        async with asyncio.timeout(CONNECT_S):
            while self.connected is None:
                if self.why:
                    raise Unavailable(self.why, code="cluster_unavailable")
                self._changed.clear()
                await self._changed.wait()

    async def inspect(self) -> Inspected:
        """The cluster's nodes and what runs where. Raises: Unavailable."""
        if self._store is None:
            await asyncio.to_thread(self._write_probe)
        try:
            await self.reach()
            number = next(self._numbers)
            self._inspections[number] = asyncio.get_running_loop().create_future()
            self.send(Inspect(number, str(self._probe), self._probe_text, self._node_store()))
            try:
                async with asyncio.timeout(INSPECT_S):
                    found = await self._inspections[number]
            finally:
                self._inspections.pop(number, None)
        except TimeoutError:
            raise Unavailable("the Ray cluster does not reply", code="cluster_unavailable") from None
        if found.flaw:
            raise Unavailable(f"the Ray cluster cannot be looked at: {found.flaw}", code="cluster_unavailable")
        return found

    async def view(self, *, brief: bool = False) -> ClusterView:
        """The cluster, with its flaws as checks. A cluster that cannot be reached is a view too."""
        found, flaw = Inspected(0), ""
        try:
            found = Inspected(0) if brief else await self.inspect()
        except Unavailable as error:
            flaw = error.message
        workers = [
            ClusterWorker(each.start.model.name, each.start.replica, found.workers.get(each.number, ""), each.waits)
            for each in self.workers
        ]
        if self.connected is None or flaw or brief:
            return ClusterView(self._entry.address, [], workers, [Check("reachable", False, flaw)] if flaw else [])
        url, trusted = None if self._store is None else self._store.url, self._entry.trusted_network
        found_checks = checks(self.connected, found.nodes, self._data_dir, trusted=trusted, store=url)
        return ClusterView(self.connected.address, found.nodes, workers, found_checks)

    @property
    def is_local(self) -> bool:
        return self.connected is not None and self.connected.is_local

    @property
    def workers(self) -> list[RayWorker]:
        return list(self._workers.values())

    def send(self, frame: Struct) -> None:
        if self._writer is None:
            return
        self._writer.write(frames.pack(frame))
        if self._writer.transport.get_write_buffer_size() > UNSENT_BYTES:
            self._replace_driver("the driver takes no messages")

    def _replace_driver(self, why: str) -> None:
        """Treat a driver that hangs as one that has ended."""
        self._flaw = why
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None

    def _node_store(self) -> NodeStore | None:
        return None if self._store is None else self._store.on_nodes(with_credentials=self.may_send_secrets)

    def for_nodes(self, provision: Provision) -> Provision:
        """With what nodes may know of the store: credentials only where nobody else reads them."""
        if provision.storage is None:
            return provision
        return replace(provision, storage=on_nodes(provision.storage, with_credentials=self.may_send_secrets))

    def prepared(self, message: Struct) -> Struct:
        """A message as nodes get it: without credentials where others read them, and with the objects of the files
        that it names.
        """
        match message:
            case Provide(provision):
                return Provide(self.for_nodes(provision))
            case Open():
                stores = message.stores if self.may_send_secrets else settings_of(message.stores)
                opening = replace(message, stores=stores)
                return opening if self._store is None else self._store.with_files(opening)
            case AnswerLive() if self._store is not None:
                return self._store.with_files(message)
        return message

    def forget(self, worker: RayWorker) -> None:
        self._workers.pop(worker.number, None)

    def _launch(self, worker: RayWorker) -> None:
        start = replace(worker.start, provision=self.for_nodes(worker.start.provision))
        if start.provision.has_secrets and not self.may_send_secrets:
            worker.fail(Failed("cluster_not_trusted", OPEN_CLUSTER, PauseReason.ENGINE_FAILED))
            return
        is_open = self._is_served and start.provision.isolation is None and not self.is_local
        if start.model.function is not None and is_open:
            worker.fail(Failed("cluster_not_isolated", OPEN_FUNCTIONS, PauseReason.ENGINE_FAILED))
            return
        node = None if self._store is None else self._store.node_order(start.model, start.provision.storage)
        order = WorkerOrder(
            messages.encode(start), start.model.engine, str(Path(start.home) / f"{start.worker}.log"),
            str(self._probe), self._probe_text, __version__,
            self._environment(start.model) if self.may_send_secrets else {}, node,
        )  # fmt: skip
        worker.was_launched, worker.waits = True, "its actor is being started"
        self.send(Launch(worker.number, worker.placement, frames.encode(order)))
        for data in worker.take_unsent():
            self.send(Deliver(worker.number, data))

    # -- what a worker leaves on its node -----------------------------------------------------------------------------

    def _end(self, worker: RayWorker, exited: Exited) -> None:
        """End a worker; if it did not end by itself, once the owner has everything that it wrote."""
        if self._store is None or exited.code == 0 or not exited.node:
            worker.end(exited.code, is_lost=exited.is_lost, ending=exited.ending)
            return
        task = asyncio.create_task(self._collect(worker, exited, self._store))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _collect(self, worker: RayWorker, exited: Exited, store: SharedStore) -> None:
        """Bring what a dead worker put to the store, and what it left on its node; then its rows may run again."""
        try:
            async with self._collecting:
                await store.settle(worker.start.worker, worker.opened)
                if not exited.is_lost and await self._bring_left(worker, store, exited.node):
                    await store.settle(worker.start.worker, worker.opened)
        except (BatchmillError, OSError) as error:
            self.note(worker, f"what it left was not brought, so those rows run again: {error}")
        finally:
            worker.end(exited.code, is_lost=exited.is_lost, ending=exited.ending)

    async def _bring_left(self, worker: RayWorker, store: SharedStore, node: str) -> bool:
        """Write what a worker left on its node to this machine. Returns whether there are rows in it."""
        order = await asyncio.to_thread(store.collect_order, worker.start.worker, worker.opened)
        future = self._collections[worker.number] = asyncio.get_running_loop().create_future()
        self.send(Collect(worker.number, node, frames.encode(order)))
        try:
            async with asyncio.timeout(COLLECT_S):
                collected = await future
        except TimeoutError:
            collected = Collected(worker.number, why=f"no reply for {COLLECT_S:g} s")
        finally:
            self._collections.pop(worker.number, None)
        if collected.why:
            self.note(worker, f"what it left was not brought, so those rows run again: {collected.why}")
            return False
        return await asyncio.to_thread(keep_left, collected.left, worker.start, worker.opened)

    def _drive(self) -> None:
        if self._driving is None:
            self._driving = asyncio.create_task(self._keep_driver())

    async def _keep_driver(self) -> None:
        """Keep a driver: one that ends, with its cluster, is followed by another one."""
        failures = 0
        while True:
            was_connected = await self._serve_driver()
            failures = 0 if was_connected else failures + 1
            await asyncio.sleep(min(RETRY_MAX_S, RETRY_S * 2 ** min(failures, 10)))

    async def _serve_driver(self) -> bool:
        """Start a driver and pass its events on until it ends. Returns whether it reached the cluster."""
        was_connected, self._flaw = False, ""
        watching = asyncio.create_task(self._tell_silence())
        try:
            reader = await self._start_driver()
            async with asyncio.timeout(CONNECT_S) as limit:
                async for event in frames.read_events(reader):
                    if isinstance(event, Connected):
                        limit.reschedule(None)
                        was_connected = True
                        watching.cancel()
                        watching = asyncio.create_task(self._watch_beats())
                    self._events += 1
                    self._receive(event)
            why = self._flaw or self._find_flaw()
        except TimeoutError:
            why = f"no reply for {CONNECT_S:g} s"
        except OSError as error:  # a driver that ended before it read the first frame has reset the connection
            why = self._flaw or self._find_flaw(error)
        except msgspec.MsgspecError as error:
            why = str(error)
        finally:
            watching.cancel()
        self._lose(why)
        await self._end_driver(0.0)
        return was_connected

    async def _tell_silence(self) -> None:
        """Tell at once where nobody answers: Ray tries for a minute."""
        if flaw := await silence_of(self._entry.address):
            self._tell(flaw)

    async def _watch_beats(self) -> None:
        """Replace a driver that says nothing. Beats are counted, not timed: this process may have been stopped too."""
        silent, events = 0, -1
        while silent < SILENT_BEATS:
            silent, events = silent + 1 if events == self._events else 0, self._events
            await asyncio.sleep(self._beat_s)
        self._replace_driver(f"the driver said nothing for {SILENT_BEATS * self._beat_s:g} s")

    async def _start_driver(self) -> asyncio.StreamReader:
        self._folder.mkdir(parents=True, exist_ok=True)  # a look at the cluster may be what first needs it
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs, open(self._folder / "ray-driver.log", "wb", buffering=0) as log:
            variables = chosen(os.environ, DRIVER_VARIABLES)
            if self._entry.address == "local":
                variables |= _own_token()
            self._process = await asyncio.create_subprocess_exec(
                self._python, "-P", "-m", "batchmill.executors.ray.driver", str(theirs.fileno()),
                pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=variables,
                start_new_session=True,
            )  # fmt: skip
        pid = self._process.pid
        self._driver = f"{pid} {started(pid)} {boot_id()}"
        (self._folder / DRIVER_PID).write_text(self._driver)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self.send(Connect(self._entry.address))
        return reader

    def _receive(self, event: Struct) -> None:
        match event:
            case Connected():
                self.connected, self.why = event, ""
                for worker in list(self._workers.values()):
                    self._launch(worker)
                self._changed.set()
            case Beat():
                pass  # that it came is counted
            case Item(number):
                if (worker := self._workers.get(number)) is not None:
                    worker.receive(event)
            case Waits(number, why):
                if (worker := self._workers.get(number)) is not None:
                    worker.waits, worker.is_placed = why, worker.is_placed or not why
            case Exited(number, _, _, why):
                if (worker := self._workers.get(number)) is not None:
                    if event.last_words:
                        self.note(worker, f"its process wrote:\n{redaction.mask(event.last_words)}")
                    if why:
                        self.note(worker, why)
                    if event.setup_flaw:
                        text = NO_SETUP.format(redaction.mask(event.setup_flaw), __version__)
                        worker.fail(Failed("node_not_set_up", text, PauseReason.ENGINE_FAILED))
                    self._end(worker, event)
            case Collected(number):
                if (future := self._collections.get(number)) is not None and not future.done():
                    future.set_result(event)
            case TaskEnded() if self.tasks is not None:
                self.tasks.receive(event)
            case Inspected(number):
                if (future := self._inspections.pop(number, None)) is not None and not future.done():
                    future.set_result(event)

    @staticmethod
    def note(worker: RayWorker, why: str) -> None:
        """Write why an actor ended to the log of its worker."""
        with contextlib.suppress(OSError), open(Path(worker.start.home) / f"{worker.start.worker}.log", "a") as log:
            log.write(f"Ray: {why}\n")

    def _lose(self, why: str) -> None:
        """The cluster has gone: its workers too. Those that were not placed wait for the next one."""
        if self._writer is not None:
            self._writer.close()
        self.connected, self._writer = None, None
        for worker in list(self._workers.values()):
            if worker.was_launched:
                worker.end(LOST, is_lost=True)
        self._tell(why)
        for number, collection in self._collections.items():
            if not collection.done():
                collection.set_result(Collected(number, why=self.why))
        if self.tasks is not None:
            self.tasks.lose(self.why)
        for future in self._inspections.values():
            if not future.done():
                future.set_result(Inspected(0, flaw=self.why))
        self._inspections.clear()

    def _tell(self, why: str) -> None:
        """Say why the cluster is not there to all who wait for it."""
        self.why = f"the Ray cluster {self._entry.address!r} cannot be reached (cluster_unavailable); it is tried again"
        self.why += f": {why}" if why else ""
        for worker in self._workers.values():
            worker.waits = self.why
        self._changed.set()

    @property
    def _python(self) -> str:
        return self._entry.python or sys.executable

    def _find_flaw(self, error: OSError | None = None) -> str:
        return find_flaw(self._folder / "ray-driver.log", self._python, error)

    async def _end_driver(self, grace_s: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), grace_s)
        finally:  # also where `close` cancels it: a driver that a signal has stopped ends in no other way
            kill_session(process.pid)
            await process.wait()
        file = self._folder / DRIVER_PID
        with contextlib.suppress(FileNotFoundError):
            if file.read_text() == self._driver:  # else a successor's is running
                file.unlink()

    async def close(self) -> None:
        """End the driver, and with it the workers that are left; a cluster that it started ends too."""
        leave_s = LEAVE_S if self.connected is not None else 0.0  # one that waits for its head waits on
        if self._driving is not None:
            self._driving.cancel()
            await asyncio.gather(self._driving, return_exceptions=True)
        self._lose("its owner is ending")
        for task in self._endings:
            task.cancel()
        await asyncio.gather(*self._endings, return_exceptions=True)
        await self._end_driver(leave_s)
        self._probe.unlink(missing_ok=True)


def _own_token() -> dict[str, str]:
    """The variables with which a cluster of our own takes nobody else."""
    return {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex + uuid.uuid4().hex,
        "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip


__all__ = ["RayExecutor"]
