"""What all tests share: which of them can run here."""

from __future__ import annotations

import compileall
import gc
import os
import shutil
import signal
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fakes import trusted_authority  # noqa: F401 - first: others keep the environment as it is then
from fakes.databases import POSTGRESQL, SQLITE, databases
from fakes.preloaded import PreloadedPopen
from fakes.slow_files import SlowFiles
from hypothesis import HealthCheck, settings

from batchmill import function_runtime

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler.protocol import Scheduling

# The folders whose files run longest: begun first, so that no process is left with one of them at the end.
LONGEST = ("story", "crash", "docs", "engines")
# Files whose tests share no fixture beyond one test: several processes run the tests of one such file.
SPLIT = (
    "crash/test_kill_provider.py",
    "crash/test_points.py",
    "docs/test_examples.py",
    "story/test_secret_leaks.py",
    "story/test_serve.py",
)

# Files whose tests run once on SQLite and once on PostgreSQL.
ON_BOTH = (
    "jobs/test_begun_retries.py",
    "jobs/test_commits.py",
    "jobs/test_finishing.py",
    "jobs/test_ledger.py",
    "jobs/test_quarantine.py",
    "jobs/test_recent_jobs.py",
    "jobs/test_recovery.py",
    "jobs/test_recovery_audit.py",
    "jobs/test_recovery_rebuild.py",
    "jobs/test_retention.py",
    "jobs/test_reuse.py",
    "jobs/test_reuse_of_many.py",
    "jobs/test_reuse_of_short_jobs.py",
    "jobs/test_server_jobs.py",
    "jobs/test_shard_notes.py",
    "jobs/test_short_jobs.py",
    "jobs/test_exact_quotas.py",
    "jobs/test_submissions.py",
    "jobs/test_turns.py",
    "server/test_metrics.py",
    "services/test_adapter_service.py",
    "services/test_clock_steps.py",
    "services/test_connector_service.py",
    "services/test_datasets.py",
    "services/test_files.py",
    "services/test_function_calls_service.py",
    "services/test_keys.py",
    "services/test_links.py",
    "services/test_llm_deployments.py",
    "services/test_model_versions.py",
    "services/test_outbox.py",
    "services/test_quotas.py",
    "services/test_remote_models.py",
    "services/test_remote_tasks.py",
    "services/test_result_files.py",
    "services/test_deployed_schemas.py",
    "services/test_uploads.py",
    "services/test_vault.py",
    "services/test_webhooks.py",
    "server/test_standby.py",
    "store/test_any_database.py",
    "store/test_compiled.py",
    "store/test_disk_room.py",
    "store/test_file_log.py",
    "store/test_revisions.py",
)

# How fast a machine is that does other work too is not a promise of ours.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
# A shell ignores SIGINT for what it starts in the background, nohup SIGHUP, and what tests start would inherit it.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

subprocess.Popen = PreloadedPopen

# PyTorch's threads would wait for each other in loops, and take the processor from other tests: on a busy machine an
# engine takes four times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# Folders of tests lie in memory where there is room: nothing of a test outlives the machine, and a third of the time of
# jobs would be waits for a disk.
MEMORY, MEMORY_BYTES = Path("/dev/shm"), 6 * 1024**3


def has_room(folder: Path) -> bool:
    """Whether tests can lie there: they run programs of their folders, which containers often forbid in memory."""
    may_run = os.access(folder, os.W_OK) and not os.statvfs(folder).f_flag & os.ST_NOEXEC
    return may_run and shutil.disk_usage(folder).free >= MEMORY_BYTES


if has_room(MEMORY):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SlowFiles())


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile what runs in functions' processes. These write no bytecode: each would compile it anew."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        compileall.compile_dir(Path(function_runtime.__file__).parent, quiet=1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of the real vLLM run where BATCHMILL_VLLM_PYTHON names its interpreter; `make test` always names one."""
    items.sort(key=lambda item: item.path.relative_to(config.rootpath).parts[1] not in LONGEST)
    if os.environ.get("BATCHMILL_VLLM_PYTHON"):
        return
    wanted = [item for item in items if item.get_closest_marker("vllm") is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = wanted


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Ten thousand tests are built at once, and stay: looking for garbage among them takes seconds."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makemodule(module_path: Path) -> Generator[None, pytest.Module | None, pytest.Module | None]:
    """Every test of ON_BOTH uses `database_kind`: pytest drops parameters of a fixture that a test does not use."""
    module = yield
    if module is not None and str(module_path).endswith(ON_BOTH):
        module.add_marker(pytest.mark.usefixtures("database_kind"))
    return module


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of ON_BOTH with each kind of database, but for those that say that they have none to choose."""
    is_once = metafunc.definition.get_closest_marker("once") is not None
    if str(metafunc.definition.path).endswith(ON_BOTH) and not is_once:
        metafunc.parametrize("database_kind", [SQLITE, POSTGRESQL], indirect=True)


@pytest.fixture
def database_kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """What `open_database` opens in this test, which must open a database of this kind, and none of the other."""
    if request.node.get_closest_marker("once") is not None:
        yield SQLITE
        return
    databases.begin(request.param)
    yield request.param
    opened = databases.end()
    assert opened == {request.param}, f"with {request.param}, this test has opened databases of {opened or 'no kind'}"


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """A packed value holds the second in which it was packed: in a test's name, two processes would tell two names."""
    return f"gzip-{len(val)}" if isinstance(val, bytes) and val.startswith(b"\x1f\x8b") else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """With `--dist loadfile`, a file's tests run in one process; those of files in SPLIT wherever there is room."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return nodeid if file.endswith(SPLIT) else file

    return Files(config, log) if config.getvalue("dist") == "loadfile" else None
