"""The socket to the worker: frames come in, frames go out together, and nobody but this very process speaks on it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import socket
import sys
import threading

from .frames import BrokenFrame, Reader

PIECES_MAX = 512  # handed to the kernel in one call; it takes 1024
JOIN_BYTES_MAX = 64 * 1024  # pieces up to here together are copied into one
SOCKET_BYTES = 4 * 1024 * 1024  # asked of the kernel for what is under way; it gives what it allows
HIGH_FD = 512  # user code that closes or reuses low descriptors does not meet ours by chance
_PR_SET_PDEATHSIG = 1

GONE, BROKEN = 0, 70  # exit codes: the worker has gone; what it said, or our own state, cannot be relied on


class Link:
    """One end of a socket pair, taken over.

    `is_child` becomes true in a process that user code forks: there the socket is closed, and whoever comes back into
    this program must end.
    """

    def __init__(self, fd):
        self._socket = socket.socket(fileno=high(fd))
        self._socket.setblocking(True)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        self._inode = os.fstat(self._socket.fileno()).st_ino
        self._pid = os.getpid()
        self._reader = Reader()
        self._poll = select.poll()
        self._poll.register(self._socket.fileno(), select.POLLIN)
        self._out = []
        self.is_child = False
        os.register_at_fork(after_in_child=self._forked)

    def fileno(self):
        return self._socket.fileno()

    def _forked(self):
        self.is_child = True
        self._out = []
        self._socket.close()

    def wait(self, timeout_s=None):
        """Whether frames, or the end, have come."""
        if self.is_child:
            os._exit(0)
        return bool(self._poll.poll(None if timeout_s is None else max(0, timeout_s * 1000)))

    def receive(self):
        """The frames that have come; never waits. Ends the process when the worker has gone."""
        frames, is_more = [], True
        while is_more:
            room = self._reader.room()
            try:
                size = self._socket.recv_into(room, 0, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:  # user code has closed it
                os._exit(GONE)
            if size == 0:
                os._exit(GONE)
            try:
                frames += self._reader.received(size)
            except BrokenFrame:
                os._exit(BROKEN)
            is_more = size == len(room)
        return frames

    def put(self, pieces):
        """Queue the pieces of a frame until `flush`."""
        self._out += pieces

    def flush(self):
        """Hand everything queued to the worker."""
        out = self._out
        if not out:
            return
        if os.getpid() != self._pid:
            os._exit(0)
        self._out = []
        if len(out) > 1 and sum(map(len, out)) <= JOIN_BYTES_MAX:
            out = [b"".join(out)]
        try:
            if os.fstat(self._socket.fileno()).st_ino != self._inode:
                os._exit(BROKEN)  # user code has closed it, and something else has its number now
            while out:
                out = _rest(out, self._socket.sendmsg(out[:PIECES_MAX]))
        except OSError:
            os._exit(GONE)


def _rest(pieces, sent):
    """What is left of the pieces when so many bytes have gone."""
    for number, piece in enumerate(pieces):
        size = len(piece)
        if sent < size:
            return [memoryview(piece)[sent:], *pieces[number + 1 :]]
        sent -= size
    return []


def high(fd):
    """The same descriptor with a high number, closed when another program is run."""
    try:
        high = _duplicate(fd)
    except OSError:  # fewer descriptors are allowed
        os.set_inheritable(fd, False)
        return fd
    os.close(fd)
    return high


def _duplicate(fd):
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD)


def end_with_worker(fd):
    """End this process when the worker has gone, whatever user code is doing then."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(GONE)
        return
    threading.Thread(target=_watch, args=(fd,), name="batchmill-worker-watch", daemon=True).start()


def _watch(fd):
    poll = select.poll()
    poll.register(fd, 0)  # the other side's end is told without being asked for
    poll.poll()
    os._exit(GONE)
