"""What user code may do to its own process, and what of it reaches the worker."""

import json
import os
import signal
import struct
import sys

import pytest


def test_what_is_printed_goes_nowhere_near_the_socket(drive):
    """print, writes to descriptor 1, and closed standard streams disturb no answer."""
    process = drive(
        "import os, sys\ndef f(a):\n  if a == 3: return a\n  print('hello', a, flush=True)\n"
        "  os.write(1, b'raw'); os.write(2, b'raw')\n  if a == 2: sys.stdout.close(); os.close(2)\n  return a"
    )
    process.ready()
    for number in range(4):
        assert process.values([[number]]) == [number]
    assert "hello 0" in process.log.read_text()
    process.stop()


def test_standard_input_is_empty(drive):
    """User code that reads from standard input gets its end, not ours."""
    process = drive("import sys\ndef f(a): return sys.stdin.read()")
    process.ready()
    assert process.values([[1]]) == [""]


@pytest.mark.parametrize("how", ["os._exit(3)", "os.kill(os.getpid(), 9)", "__import__('ctypes').string_at(0)"])
def test_the_row_that_kills_is_named(drive, how):
    """After the death of the process, the progress memory holds exactly the row that was being called."""
    process = drive(f"import os\ndef f(a):\n  if a == 5: {how}\n  return a")
    process.ready()
    ask_id = process.ask([[i] for i in range(9)])
    with pytest.raises(EOFError):
        process.receive()
    assert process.blamed() == [(ask_id, 5, 1)]


def test_the_batch_that_kills_is_named(drive):
    """For a function of many rows, all rows of the call are named, by ask."""
    process = drive("import os, batchmill\n@batchmill.batched(4)\ndef f(a):\n  if 5 in a: os._exit(1)\n  return a")
    process.ready()
    with process.together():
        first, second = process.ask([[0], [1], [2], [3], [4], [6]]), process.ask([[5]])
        third = process.ask([[7]])
    with pytest.raises(EOFError):
        while True:
            process.receive()
    assert process.blamed() == [(first, 4, 2), (second, 0, 1), (third, 0, 1)]


def test_the_calls_of_a_loop_that_dies_are_named(drive):
    """For an async function, the calls that had not ended are named, and no others."""
    process = drive(
        "import os, asyncio\nasync def f(a):\n  if a == 'die': os._exit(1)\n"
        "  await asyncio.sleep(1000 if a == 'wait' else 0)\n  return a"
    )
    process.ready()
    ids = [process.ask([[a]]) for a in (1, "wait", 2, "wait")]
    assert {process.receive()[0]["id"] for _ in range(2)} == {ids[0], ids[2]}
    ids.append(process.ask([["die"]]))
    with pytest.raises(EOFError):
        process.receive()
    assert sorted(process.blamed()) == [(ids[1], 0, 1), (ids[3], 0, 1), (ids[4], 0, 1)]


@pytest.mark.parametrize("mark", ["def", "async def", "@batchmill.batched(2)\ndef", "@batchmill.batched(2)\nasync def"])
def test_what_has_begun_stays_known(drive, mark):
    """Every kind of function notes in a request's slot that it has begun, once it has, and for good."""
    result = "a" if "batched" in mark else "[a]"
    process = drive(f"import batchmill\n{mark} f(a):\n  return {result}")
    process.ready()
    assert process.slot(3) == 0
    for _ in range(2):
        process.values([[1], [2]], slot=3)
        assert process.slot(3) == process._next_id
    process.values([[1]])
    assert (process.slot(3), process.blamed()) == (process._next_id - 1, [])


def test_nothing_is_blamed_between_calls(drive):
    """While user code is not running, nobody is to blame for a death."""
    process = drive("def f(a): return a")
    process.ready()
    process.values([[1], [2]])
    process.process.kill()
    process.process.wait()
    assert process.blamed() == []


def test_closed_descriptors_end_the_process(drive):
    """A function that closes all descriptors has closed the socket: the process ends and speaks no more."""
    process = drive("import os\ndef f(a): os.closerange(3, 4096); return a")
    process.ready()
    process.ask([[1]])
    with pytest.raises(EOFError):
        process.receive()
    assert process.process.wait(10) == 0


def test_another_file_in_the_place_of_the_socket_is_never_written_to(drive, tmp_path):
    """What user code opens after it closed everything gets none of our bytes, even with our descriptor's number."""
    target = tmp_path / "victim"
    process = drive(
        "import os\ndef f(a):\n  os.closerange(3, 4096)\n"
        f"  fds = [os.open({str(target)!r}, os.O_CREAT | os.O_RDWR) for _ in range(600)]\n  return a"
    )
    process.ready()
    process.ask([[1]])
    with pytest.raises(EOFError):
        process.receive()
    assert process.process.wait(10) == 70
    assert target.read_bytes() == b""


@pytest.mark.parametrize("mark", ["", "import batchmill\n@batchmill.batched(4)\n", "async "])
def test_a_forked_child_never_speaks(drive, mark):
    """A child that returns from the function ends there; every row is answered once, by the parent."""
    body = "def f(a):\n  import os\n  pid = os.fork()\n  if pid: os.waitpid(pid, 0)\n  return a"
    process = drive(mark + body)
    process.ready()
    for _ in range(3):
        assert process.values([[1], [2], [3]]) == [1, 2, 3]
    assert process.stop() == 0


def test_a_forked_child_that_raises_never_speaks(drive):
    """Nor does one that leaves the function by an exception."""
    process = drive(
        "import os\ndef f(a):\n  pid = os.fork()\n  if not pid: raise ValueError\n  os.waitpid(pid, 0)\n  return a"
    )
    process.ready()
    assert process.values([[1], [2]]) == [1, 2]


def test_the_process_ends_with_its_worker(drive):
    """When the socket is closed the process exits."""
    process = drive("def f(a): return a")
    process.ready()
    process.socket.close()
    assert process.process.wait(10) == 0


def test_a_broken_frame_ends_the_process(drive):
    """Whatever else comes through the socket, nothing of it is believed."""
    process = drive("def f(a): return a")
    process.ready()
    process.socket.sendall(b"x" * 64)
    assert process.process.wait(10) == 70


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts like this on Linux")
@pytest.mark.parametrize("word", ["", "async "])
def test_memory_is_limited(drive, word):
    """A row that asks for more memory than there may be fails with memory_limit, and the next one works."""
    process = drive(f"{word}def f(a): return len(bytearray(a))", memory_bytes=512 * 1024 * 1024)
    process.ready()
    values, errors = process.call([[10], [2**30], [20]])
    assert values == [10, None, 20]
    assert errors[1][0] == "memory_limit"
    assert process.values([[3]]) == [3]


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts like this on Linux")
@pytest.mark.parametrize("word", ["", "async "])
def test_a_function_that_keeps_its_memory_is_replaced(drive, word):
    """With its memory full of what the function holds on to, the process ends by itself once it has answered."""
    code = f"kept = []\n{word}def f(a):\n  while True: kept.append(bytearray(1 << 20))"
    process = drive(code, memory_bytes=256 * 1024 * 1024)
    process.ready()
    assert process.call([[1]])[1][0][0] == "memory_limit"
    assert process.process.wait(20) == 71
    assert process.blamed() == []


def test_a_signal_handler_of_the_function_ends_no_answer(drive):
    """Signals that user code handles itself interrupt nothing of ours."""
    process = drive(
        "import signal\nseen = []\nsignal.signal(signal.SIGUSR1, lambda *_: seen.append(1))\ndef f(a): return len(seen)"
    )
    process.ready()
    os.kill(process.process.pid, signal.SIGUSR1)
    assert process.values([[1]]) == [1]


def test_live_rows_run_between_rows_of_a_job(drive):
    """A live ask is answered while many rows of a job are being called, between two of its rows."""
    process = drive("import time\ndef f(a):\n  time.sleep(0.002)\n  return a")
    process.ready()
    row_batch = process.ask([[i] for i in range(1000)], from_job=True)
    came = process.receive()[0]
    live = process.ask([["live"]])
    rows = came["rows"]
    while came["id"] != live:
        came, buffers = process.receive()
        rows += came["rows"] if came["id"] == row_batch else 0
    assert json.loads(buffers[0]) == ["live"]
    assert rows < 900


def test_an_abandoned_request_stops(drive):
    """Rows that nobody waits for are not called any more, and nothing is said of them."""
    process = drive("import time\nn = 0\ndef f(a):\n  global n\n  n += 1\n  time.sleep(0.001)\n  return n")
    process.ready()
    row_batch = process.ask([[i] for i in range(100_000)], from_job=True)
    process.receive()
    process.send({"kind": "abandon", "id": row_batch})
    live = process.ask([[0]])
    came = {"id": row_batch}
    while came["id"] != live:
        came, buffers = process.receive()
    called = json.loads(buffers[0])[0]
    assert called < 90_000
    process.rows = {}
    assert process.values([[0]]) == [called + 1]


def test_rows_of_jobs_are_answered_in_stages(drive):
    """Finished rows of a job are sent while the rest are called, in order and without a gap."""
    process = drive("import time\ndef f(a):\n  time.sleep(0.004)\n  if a == 30: raise ValueError(a)\n  return a")
    process.ready()
    row_batch = process.ask([[i] for i in range(60)], from_job=True)
    process.rows = {row_batch: 60}
    values, errors = process.answer(row_batch)
    assert process.last["first"] > 0
    assert values == [i if i != 30 else None for i in range(60)]
    assert list(errors) == [30]


def test_the_progress_page_is_as_the_worker_reads_it():
    """u32 count, then entries of u64, u32, u32 without gaps; u32 slots from 64 KiB on."""
    from batchmill.function_runtime.printing import BYTES, ENTRIES_BYTES, ENTRIES_MAX, SLOTS_MAX, Progress

    fd = os.memfd_create("progress")
    os.ftruncate(fd, BYTES)
    copy = os.dup(fd)
    progress = Progress(fd)

    def read():
        data = os.pread(copy, 65536, 0)
        return [struct.unpack_from("<QII", data, 4 + 16 * at) for at in range(struct.unpack_from("<I", data)[0])]

    progress.one(2**40 + 1, 7)
    assert read() == [(2**40 + 1, 7, 1)]
    progress.many([(1, 2, 3), (4, 5, 6)])
    progress.add(2, 7, 8, 9)
    assert read() == [(1, 2, 3), (4, 5, 6), (7, 8, 9)]
    progress.take(0, 3)
    assert read() == [(7, 8, 9), (4, 5, 6)]
    progress.none()
    assert read() == []
    progress.many([(1, 2, 3)] * (ENTRIES_MAX + 1))
    assert len(read()) == ENTRIES_MAX
    for number, slot in ((5, 0), (2**40 + 1, SLOTS_MAX - 1), (6, SLOTS_MAX), (7, -1)):
        progress.begin(number, slot)
    slots = struct.unpack(f"<{SLOTS_MAX}I", os.pread(copy, BYTES, ENTRIES_BYTES))
    assert (slots[0], slots[-1], sum(map(bool, slots)), len(read())) == (5, 1, 2, ENTRIES_MAX)
    os.close(copy)
