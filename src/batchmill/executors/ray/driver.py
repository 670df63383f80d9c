"""The driver: a child of the owner that is connected to Ray, and the only process of batchmill's that a lost head or an
actor's reply could harm. `python -P -m batchmill.executors.ray.driver FD`, FD a socket to the owner.

It has no database, no key file and no secret of its own; it passes bytes between actors and owner, and unpickles none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import socket
import ssl
import subprocess
import sys
import time
import traceback
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import ray
from msgspec import Struct, structs
from ray.exceptions import ObjectStoreFullError, OutOfDiskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from batchmill import __version__
from batchmill.executors.ray import frames
from batchmill.executors.ray.actor import HostedWorker, sees
from batchmill.executors.ray.bytes_only import ActorFailed, install, verify
from batchmill.executors.ray.driver_flaws import find_full_disk
from batchmill.executors.ray.frames import (
    BEAT_S,
    EXITED,
    FRAME_BYTES_MAX,
    ITEM_BYTES,
    KILLED,
    LENGTH_BYTES,
    LOST,
    BadPiece,
    Beat,
    Collect,
    Collected,
    Connect,
    Connected,
    Deliver,
    EndTask,
    Exited,
    Inspect,
    Inspected,
    Item,
    Kill,
    Launch,
    Pieces,
    Placement,
    RunTask,
    Waits,
    join,
)
from batchmill.executors.ray.node_cache import cache_folder, collect
from batchmill.executors.ray.node_checks import find_flaw
from batchmill.executors.ray.task_runs import TaskRuns
from batchmill.executors.ray.waiting import waits_for
from batchmill.types.cluster import ClusterNode

LOCAL_STORE_BYTES = 100 * 1024 * 1024  # object store of a cluster that we start: only messages pass through it
ITEMS_AHEAD = 64  # items of a worker that the driver has not read
PENDING_BYTES = 256 * 1024 * 1024  # of messages for a worker that does not take them: then it is killed
WATCH_S = 2.0  # between two looks at waiting actors, draining nodes and the head
HEAD_S = 10.0  # for the head to reply; after HEAD_TRIES of it the cluster is lost
HEAD_TRIES = 2
LEAVE_S = 5.0  # for workers to write what is finished, after the owner has ended
COLLECT_S = 60.0  # for a node to bring what a dead worker left; then those rows run again
PROBE_S = 20.0  # for a node to tell its versions, or what a process wrote
WORDS_BYTES = 2048  # of it
FULL = (ObjectStoreFullError, OutOfDiskError)
FULL_STORE = (
    "the object store of Ray on this machine is full, and so is the disk that it spills to: make room, or end what "
    "holds objects there (`ray memory`)"
)
FULL_FIRST_S, FULL_MAX_S = 0.5, 10.0  # between two tries to send a message to a worker; doubles
NO_EXIT_CODE = "Ray knows no exit code: it crashed, was killed, for example for lack of memory, or called os._exit"
REFUSED = 77  # exit code of a caller without a token that the head has refused for it


class DriverWorker:
    """A worker's actor, as the driver sees it."""

    def __init__(self, number: int, placement: Placement) -> None:
        self.number, self.placement = number, placement
        self.actor: Any = None
        self.node = ""  # id; empty: it waits for its place
        self.why = ""  # it waits, as last reported
        self.was_killed = self.is_evicted = False
        self.is_full = False  # it is being killed, because too many messages wait for it
        self.is_cut_off = False  # it is being killed for no fault of its own: messages did not reach it
        self.pending: list[bytes] = []
        self.pending_bytes = 0
        self.sending: asyncio.Task[None] | None = None
        self.receiving: asyncio.Task[None] | None = None


class Driver:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._workers: dict[int, DriverWorker] = {}
        self._actor_class = ray.remote(HostedWorker)
        self._tasks: set[asyncio.Task[None]] = set()
        self._runs = TaskRuns(self._send)
        self._is_ending = False

    async def run(self) -> None:
        """Serve the owner until it ends. Ends the process if the cluster is lost, or for a bug of this program."""
        watching = asyncio.create_task(self._watch())
        commands = asyncio.create_task(self._obey())
        beating = asyncio.create_task(self._beat())
        await asyncio.wait({watching, commands, beating}, return_when=asyncio.FIRST_COMPLETED)
        if not watching.done():
            await self._let_leave()
        failures = [each.exception() for each in (watching, commands, beating) if each.done()]
        for failure in filter(None, failures):
            traceback.print_exception(failure)
            print(f"the driver failed: {type(failure).__name__}: {failure}", flush=True)
        if watching.done() or any(failures):
            os._exit(1)  # threads that wait for the head would keep this process, and so its owner from trying again

    async def _let_leave(self) -> None:
        """Give the workers time to write what is finished."""
        self._is_ending = True
        leaves = [each.actor.leave.remote() for each in self._workers.values() if each.node]
        receiving = [each.receiving for each in self._workers.values() if each.node and each.receiving is not None]
        if leaves:
            await asyncio.wait(receiving, timeout=LEAVE_S)

    def _send(self, frame: Struct) -> None:
        self._writer.write(frames.pack(frame))

    async def _obey(self) -> None:
        while True:
            try:
                size = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
                assert size <= FRAME_BYTES_MAX, "the owner speaks another protocol"
                data = await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            match frames.commands.decode(data):
                case Launch() as launch:
                    try:
                        self._launch(launch)
                    except Exception as error:  # whatever Ray raises for a placement that it refuses
                        self._workers.pop(launch.worker, None)
                        self._send(Exited(launch.worker, 1, why=f"{type(error).__name__}: {error}"[:2000]))
                case Deliver(number, message):
                    if (worker := self._workers.get(number)) is not None:
                        self._deliver(worker, message)
                case Kill(number):
                    if (worker := self._workers.get(number)) is not None:
                        worker.was_killed = True
                        ray.kill(worker.actor)
                case Inspect() as inspect:
                    self._begin(self._inspect(inspect))
                case Collect() as collect:
                    self._begin(self._collect(collect))
                case RunTask() as order:
                    self._runs.begin(order)
                case EndTask(number):
                    self._runs.end(number)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat(self) -> None:
        """Tell the owner that this process runs."""
        while True:
            if not self._writer.transport.get_write_buffer_size():
                self._send(Beat())
            await asyncio.sleep(BEAT_S)

    # -- workers ------------------------------------------------------------------------------------------------------

    def _launch(self, launch: Launch) -> None:
        worker = self._workers[launch.worker] = DriverWorker(launch.worker, self._placed(launch.placement))
        needs = worker.placement
        options: dict[str, Any] = {"num_cpus": needs.cpus, "num_gpus": needs.gpus, "resources": needs.resources or None}
        if needs.memory_bytes:
            options["memory"] = needs.memory_bytes
        worker.actor = self._actor_class.options(max_restarts=0, max_task_retries=0, **options).remote()
        stream = worker.actor.run.options(
            num_returns="streaming", _generator_backpressure_num_objects=ITEMS_AHEAD
        ).remote(launch.order)
        worker.receiving = asyncio.create_task(self._receive(worker, stream))

    @staticmethod
    def _placed(placement: Placement) -> Placement:
        """With the GPUs that its flags ask for, where the cluster has GPUs."""
        if placement.gpus is not None:
            return placement
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        gpus = placement.gpus_by_flags if has_gpus else 0
        return Placement(placement.cpus, gpus, 0, placement.memory_bytes, placement.resources)

    async def _receive(self, worker: DriverWorker, stream: Any) -> None:
        """Pass a worker's items on until its actor has ended."""
        exited, pieces = Exited(worker.number, LOST, True, "its actor ended without a word"), Pieces()
        try:
            async for ref in stream:
                item = await ref
                if not worker.node:
                    worker.node = item.decode("ascii", "replace")
                    self._send(Waits(worker.number, ""))
                    worker.actor.set_time.remote(repr(time.time()).encode())
                    self._flush(worker)
                elif item.startswith(EXITED):
                    code = int(item[len(EXITED) :])
                    is_lost = code == LOST or self._is_ending
                    exited = Exited(worker.number, LOST if is_lost else code, is_lost)
                    break
                elif (whole := pieces.take(item)) is not None:
                    self._send(Item(worker.number, whole))
                    await self._writer.drain()
        except ActorFailed as error:
            if worker.was_killed:
                exited = Exited(worker.number, KILLED)
            elif worker.is_cut_off:
                exited = Exited(worker.number, LOST, True, "messages for it did not arrive")
            elif error.is_of_setup and not worker.node:
                exited = Exited(worker.number, 1, why=str(error), setup_flaw=error.last_line)
            else:
                exited = await self._ended(worker, error)
        except BadPiece as error:
            exited = Exited(worker.number, KILLED, why=str(error))
        except ConnectionError:
            return  # the owner has ended
        except Exception as error:  # whatever Ray raises for an actor that it lost: none of it ends the driver
            exited = Exited(worker.number, LOST, True, f"{type(error).__name__}: {error}"[:2000])
        self._workers.pop(worker.number, None)
        with contextlib.suppress(Exception):  # it may be gone
            ray.kill(worker.actor)
        if worker.sending is not None:
            worker.sending.cancel()
        self._send(structs.replace(exited, node=worker.node))

    async def _ended(self, worker: DriverWorker, error: ActorFailed) -> Exited:
        """How an actor ended that nobody has killed."""
        if error.is_lost or (worker.node and not await self._is_alive(worker.node)):
            return Exited(worker.number, LOST, True, str(error))
        words = "" if worker.node or error.process is None else await self._last_words(*error.process)
        code = error.exit_code or KILLED
        flaw, ending = "", "" if error.exit_code else NO_EXIT_CODE
        if error.exit_code and not worker.node:  # what has called `sys.exit` will do so again
            flaw = f"a process there ended with exit code {code} while batchmill was imported"
            flaw += f", and wrote {words.splitlines()[-1]!r}" if words else ""
        return Exited(worker.number, code, why=str(error), setup_flaw=flaw, ending=ending, last_words=words)

    async def _last_words(self, address: str, pid: int) -> str:
        """What a dead process of a node wrote last to its standard error."""
        with contextlib.suppress(Exception):  # the node may be gone, or start no process at all
            async with asyncio.timeout(PROBE_S):
                for node in await asyncio.to_thread(ray.nodes):
                    if node["Alive"] and node["NodeManagerAddress"] == address:  # of a test, several have one
                        words = await _on_node(_end_of_log, node["NodeID"]).remote(pid, WORDS_BYTES)
                        if lines := [line for line in words.decode(errors="replace").splitlines() if line[:1] != ":"]:
                            return "\n".join(lines)  # without Ray's own, such as ":job_id:01000000"
        return ""

    def _deliver(self, worker: DriverWorker, message: bytes) -> None:
        """Send a message with those that gather while the last ones are on their way."""
        if worker.is_full:
            return
        worker.pending.append(message)
        worker.pending_bytes += len(message)
        if worker.pending_bytes > PENDING_BYTES:
            worker.is_full, worker.is_cut_off = True, not worker.node  # one that runs, and takes nothing, hangs
            worker.pending.clear()
            ray.kill(worker.actor)
        elif worker.node:
            self._flush(worker)

    def _flush(self, worker: DriverWorker) -> None:
        if worker.pending and worker.sending is None:
            worker.sending = asyncio.create_task(self._send_pending(worker))

    async def _send_pending(self, worker: DriverWorker) -> None:
        try:
            while worker.pending:
                batch, size = [], 0
                while worker.pending and (not batch or size + len(worker.pending[0]) <= ITEM_BYTES):
                    size += len(worker.pending[0])
                    batch.append(worker.pending.pop(0))
                item = join(batch)
                await (await self._submitted(worker, item))
                worker.pending_bytes -= size
        except ActorFailed:
            return  # `_receive` gets the same, and tells the owner
        except Exception as error:  # whatever Ray raises: these messages are lost, and so is the worker
            print(f"messages of a worker were not sent: {type(error).__name__}: {error}", flush=True)
            worker.is_cut_off = True
            ray.kill(worker.actor)
        finally:
            worker.sending = None

    async def _submitted(self, worker: DriverWorker, item: bytes) -> Any:
        """The call that brings an item to a worker, once Ray's object store has room for it: longer ones go through it.

        Raises: whatever Ray does.
        """
        wait_s = FULL_FIRST_S
        while True:
            try:
                call = worker.actor.deliver.remote(item)
            except FULL as error:
                print(f"messages of a worker wait: {type(error).__name__}: {error}", flush=True)
                worker.why = FULL_STORE
                self._send(Waits(worker.number, FULL_STORE))
                await asyncio.sleep(wait_s)
                wait_s = min(FULL_MAX_S, 2 * wait_s)
            else:
                if worker.why == FULL_STORE:
                    worker.why = ""
                    self._send(Waits(worker.number, ""))
                return call

    # -- the cluster --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Tell why actors wait, evict workers of leaving nodes; return when the cluster is lost."""
        failures = 0
        while failures < HEAD_TRIES:
            await asyncio.sleep(WATCH_S)
            try:
                async with asyncio.timeout(HEAD_S):
                    nodes, free, draining = await asyncio.to_thread(_look)
            except Exception as error:  # Ray raises what it likes when its head is gone
                print(f"the head of the cluster does not reply: {type(error).__name__}: {error}", flush=True)
                failures += 1
                continue
            own = ray.get_runtime_context().get_node_id()
            if not any(node["NodeID"] == own and node["Alive"] for node in nodes):
                print("the cluster has lost this machine", flush=True)
                failures += 1
                continue
            failures = 0
            for worker in list(self._workers.values()):
                if worker.node in draining and not worker.is_evicted:
                    worker.is_evicted = True
                    worker.actor.evict.remote()
                if not worker.node and (why := waits_for(worker.placement, nodes, free)) != worker.why:
                    worker.why = why
                    self._send(Waits(worker.number, why))
        print("the cluster is lost", flush=True)

    async def _is_alive(self, node_id: str) -> bool:
        with contextlib.suppress(Exception):  # the head is gone
            async with asyncio.timeout(HEAD_S):
                return any(each["NodeID"] == node_id and each["Alive"] for each in await asyncio.to_thread(ray.nodes))
        return False

    async def _collect(self, collect: Collect) -> None:
        """Bring what a dead worker left on its node."""
        try:
            async with asyncio.timeout(COLLECT_S):
                left = await _on_node(_collect, collect.node).remote(collect.order)
            self._send(Collected(collect.worker, left))
        except Exception as error:  # the node may be gone
            self._send(Collected(collect.worker, why=f"{type(error).__name__}: {error}"[:2000]))

    async def _inspect(self, inspect: Inspect) -> None:
        try:
            nodes, free, draining = await asyncio.to_thread(_look)
            alive = [node for node in nodes if node["Alive"]]
            views = await asyncio.gather(*(self._view(node, free, draining, inspect) for node in alive))
            workers = {each.number: each.node for each in self._workers.values() if each.node}
            self._send(Inspected(inspect.id, list(views), workers))
        except Exception as error:  # as above
            self._send(Inspected(inspect.id, flaw=f"{type(error).__name__}: {error}"[:2000]))

    async def _view(
        self, node: dict[str, Any], free: dict[str, dict[str, float]], draining: set[str], inspect: Inspect
    ) -> ClusterNode:
        node_id = node["NodeID"]
        facts: dict[str, Any] = {}
        flaw = ""
        try:
            node_store = b"" if inspect.node is None else frames.encode(inspect.node)
            async with asyncio.timeout(PROBE_S):
                probing = _on_node(_probe, node_id).remote(inspect.probe, inspect.probe_text, node_store)
                facts = json.loads(await probing)
            facts["clock_offset_s"] = facts["clock_offset_s"] - time.time()
        except Exception as error:  # a node without batchmill, or one that has just left
            flaw = f"it did not reply: {error}"[:500] or type(error).__name__
        return ClusterNode(
            node_id, node["NodeManagerAddress"], _plain(node["Resources"]), _plain(free.get(node_id, {})),
            node_id in draining, flaw=flaw, **facts,
        )  # fmt: skip


def _plain(resources: dict[str, float]) -> dict[str, float]:
    """Without the resources that Ray names after nodes."""
    return {name: float(amount) for name, amount in resources.items() if not name.startswith("node:")}


def _look() -> tuple[list[dict[str, Any]], dict[str, dict[str, float]], set[str]]:
    """The nodes, what is free on each, and which are draining."""
    state = ray._private.state
    return ray.nodes(), state.available_resources_per_node(), set(state.state.get_draining_nodes())


def _on_node(task: Any, node_id: str) -> Any:
    """A task that runs on this node, and takes no place there."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return task.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)


@ray.remote
def _end_of_log(pid: int, size_max: int) -> bytes:
    """The end of what a process of Ray's wrote to its standard error. Nothing of batchmill's is imported for it: that
    may be what ended the process.
    """
    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    return b"".join(path.read_bytes()[-size_max:] for path in folder.glob(f"worker-*-{pid}.err"))[-size_max:]


@ray.remote
def _collect(order_data: bytes) -> bytes:
    """As `node_cache.collect`, with a packed `CollectOrder`."""
    order = frames.collect_orders.decode(order_data)
    return frames.encode(collect(cache_folder(order.cache, order.url), order.worker, order.sizes))


@ray.remote
def _probe(path: str, text: str, node_store: bytes) -> bytes:
    """What a node has, as JSON. `node_store`: a packed `NodeStore`; empty: it is to see the data directory."""
    return json.dumps(
        {
            "ray": ray.__version__,
            "python": platform.python_version(),
            "batchmill": __version__,
            "clock_offset_s": time.time(),
            "sees_data": not node_store and sees(path, text),
            "store_flaw": find_flaw(frames.node_stores.decode(node_store)) if node_store else "",
        }
    ).encode()


def _connect(order: Connect) -> Connected:
    """Reach the cluster, or start one. Raises: what Ray raises."""
    common = {"log_to_driver": False, "configure_logging": False, "include_dashboard": False}
    is_local = order.address == "local"
    if is_local:
        if flaw := find_full_disk(os.environ):
            sys.exit(flaw)
        ray.init(
            address="local", num_cpus=order.cpus, object_store_memory=LOCAL_STORE_BYTES, _node_ip_address="127.0.0.1",
            **common,
        )  # fmt: skip
    else:
        common.pop("include_dashboard")
        ray.init(address=order.address, **common)
    address = ray.get_runtime_context().gcs_address
    return Connected(
        address, ray.__version__, platform.python_version(), __version__, is_local,
        demands_token=is_local or _demands_token(address), has_tls=_has_tls(address, os.environ),
    )  # fmt: skip


def _demands_token(address: str) -> bool:
    """Whether the head refuses a caller without a token, as far as one finds out by calling it."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return False
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    code = (  # a call that fails for another reason (no connection, a time limit) tells nothing about tokens
        "import sys; from ray._raylet import GcsClient; from ray.exceptions import AuthenticationError\n"
        "try: GcsClient(address=sys.argv[1]).internal_kv_keys(b'', None, timeout=5)\n"
        f"except AuthenticationError: sys.exit({REFUSED})"
    )
    call = [sys.executable, "-P", "-c", code, address]
    try:
        done = subprocess.run(
            call, env={**environ, "RAY_AUTH_MODE": "disabled"}, capture_output=True, timeout=30, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == REFUSED


def _has_tls(address: str, environ: Mapping[str, str]) -> bool:
    """Whether the head proves with a certificate of our authority who it is, found out by a handshake of our own."""
    if environ.get("RAY_USE_TLS", "").lower() not in ("1", "true"):
        return False
    host, _, port = address.rpartition(":")
    try:
        context = ssl.create_default_context(cafile=environ["RAY_TLS_CA_CERT"])
        context.load_cert_chain(environ["RAY_TLS_SERVER_CERT"], environ["RAY_TLS_SERVER_KEY"])
        context.set_alpn_protocols(["h2"])
        name = host.strip("[]")
        with socket.create_connection((name, int(port)), timeout=HEAD_S) as plain:
            context.wrap_socket(plain, server_hostname=name).close()
    except (OSError, KeyError, ValueError) as error:
        print(f"the head made no TLS connection: {type(error).__name__}: {error}", flush=True)
        return False
    return True


def main(fd: int) -> int:
    sock = socket.socket(fileno=fd)
    size = int.from_bytes(sock.recv(LENGTH_BYTES, socket.MSG_WAITALL), "little")
    order = frames.commands.decode(sock.recv(size, socket.MSG_WAITALL))
    assert isinstance(order, Connect), "the first frame says where the cluster is"
    install()
    connected = _connect(order)
    verify(ray)
    sock.setblocking(False)
    asyncio.run(_serve(sock, connected))
    ray.shutdown()
    return 0


async def _serve(sock: socket.socket, connected: Connected) -> None:
    reader, writer = await asyncio.open_connection(sock=sock)
    writer.write(frames.pack(connected))
    await Driver(reader, writer).run()
    with contextlib.suppress(ConnectionError, TimeoutError):
        await asyncio.wait_for(writer.drain(), LEAVE_S)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
