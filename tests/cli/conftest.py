"""A command line over jobs that lie in memory: what they go through is written down by the test."""

import asyncio
import contextlib
import signal

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from batchmill.cli.local import LocalApp
from batchmill.cli.main import cli
from batchmill.cli.session import Session
from batchmill.errors import InvalidTransition, UnknownName
from batchmill.states import JobState
from batchmill.types import JobQuery, JobView, LedgerReport, Submitted, Wait


@pytest.fixture(autouse=True)
def hangs_up_as_at_a_terminal():
    """A run of the tests that ignores SIGHUP, as under nohup, shows what a command does at a terminal all the same."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


class MemoryJobs:
    """`cli.clients.Jobs` over a list of views for each job; `watch` goes through them and stays at the last."""

    def __init__(self):
        self.views = {}
        self.orders = []
        self.asked = []
        self.retries = []  # what each changed, and the model that it names
        self.queries = []  # of lists
        self.how = "started"
        self.reasons, self.ahead = [], 0
        self.report = LedgerReport("job_1", rows=10, rows_done=10, commits=2, segments=1, bytes=2000)
        self.before_view = lambda number: None  # called before each view that `watch` gives
        self.waits_for_pause = False  # `watch` shows the last view only once somebody paused
        self.pausing = asyncio.Event()

    def add(self, *views):
        self.views[views[-1].id] = list(views)
        return self

    def _views(self, job_id):
        found = [job for job in self.views if job.startswith(job_id)]
        if len(found) != 1:
            raise UnknownName(f"no job is called {job_id!r}", code="unknown_job")
        return self.views[found[0]]

    async def submit(self, order):
        self.orders.append(order)
        return Submitted(next(iter(self.views)), self.how)

    async def list(self, query=JobQuery()):
        self.queries.append(query)
        return [views[-1] for views in self.views.values()][: query.limit]

    async def show(self, job_id):
        return self._views(job_id)[0]

    async def watch(self, job_id, interval_s=0.5):
        views = self._views(job_id)
        for number, view in enumerate(views[:-1]):
            self.before_view(number)
            yield view
        if self.waits_for_pause:
            await self.pausing.wait()
        yield views[-1]

    async def steer(self, job_id, verb):
        self.asked.append((verb, job_id))
        view = self._views(job_id)[-1]
        if verb == "pause":
            self.pausing.set()
        if verb == "pause" and view.state in (JobState.COMPLETED, JobState.FAILED):
            raise InvalidTransition(f"the job {job_id} has ended")
        return view

    async def retry(self, job_id, change, model):
        self.asked.append(("retry", job_id))
        self.retries.append((change, model))
        return self._views(job_id)[-1]

    async def remove(self, job_id):
        view = self._views(job_id)[-1]
        if not JobState(view.state).is_at_rest:
            raise InvalidTransition(f"the job {view.id} is {view.state}: cancel it before it is removed")
        del self.views[view.id]
        return view

    async def amend(self, job_id, change):
        self.asked.append((change, job_id))
        return replace(self._views(job_id)[-1], priority=change.priority or 0, deadline=change.deadline)

    async def explain(self, job_id):
        view = self._views(job_id)[-1]
        return Wait(view.id, view.state, self.reasons, self.ahead)

    async def verify(self, job_id):
        return replace(self.report, job=self._views(job_id)[-1].id)

    async def rebuild(self, job_id):
        return replace(self.report, job=self._views(job_id)[-1].id, adopted=3)


class MemoryApp(LocalApp):
    """What commands call, over MemoryJobs; results are files on this machine."""

    def __init__(self):
        self.jobs = MemoryJobs()
        self.configs, self.projects = [], []
        self.report = None
        self.explanation = None
        self.estimate = None
        self.partial = b""
        self.was_cancelled = False
        self.was_closed = False
        self.while_closing = lambda: None

    @contextlib.asynccontextmanager
    async def open_jobs(self, config, project=None):
        self.configs.append(config)
        self.projects.append(project)
        try:
            yield self.jobs
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        finally:
            self.while_closing()
            for _ in range(10):
                await asyncio.sleep(0)  # turns of the loop, in which a signal is heard
            self.was_closed = True

    async def preview_validate(self, order, config, progress):
        progress(0.5)
        self.jobs.orders.append(order)
        return self.report

    async def preview_plan(self, order, config, progress):
        self.jobs.orders.append(order)
        return self.report, self.explanation

    async def preview_estimate(self, order, config, progress):
        self.jobs.orders.append(order)
        return self.report, self.estimate

    async def partial_results(self, config, job_id, out, *, sampled=False):
        out.write(self.partial)
        return self.partial.count(b"\n")


@pytest.fixture
def app():
    return MemoryApp()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with a function, an input and no configuration; the data directory lies in it."""
    (tmp_path / "app.py").write_text("def f(): ...")
    (tmp_path / "in.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCHMILL_DATA_DIR", str(tmp_path / "data"))
    for name in ("BATCHMILL_CONFIG", "BATCHMILL_SERVER", "BATCHMILL_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def call(app, place):
    """Call the command line as a person would; returns click's result."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def invoke(*args):
        return CliRunner().invoke(cli, list(args), obj=Session(app))

    yield invoke
    for each, handler in handlers.items():
        signal.signal(each, handler)


@pytest.fixture
def view():
    """A running job of ten rows; arguments change it."""

    def make(**fields):
        return replace(JobView(id="job_1", state="running", rows=10, model="m", created=1_700_000_000.0), **fields)

    return make
