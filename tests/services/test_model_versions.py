"""Versions of deployed functions: made, checked, chosen, moved between, removed."""

import asyncio
import io
import math
import random
import shutil
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from fakes.databases import open_database
from fakes.held_clock import HeldClock
from fakes.packages import add_wheel, use_as_index
from fakes.terms import SetTerm
from msgspec.structs import replace

from batchmill.config import Config, ModelEntry
from batchmill.errors import Conflict, Forbidden, InvalidInput, ModelFailed, TermOver, UnknownName
from batchmill.jobs.ledger import records as job_records
from batchmill.jobs.ledger import snapshot
from batchmill.jobs.ledger.deployed import refuse_removed
from batchmill.jobs.ledger.ledger import Ledger
from batchmill.owned_files import OwnedFiles
from batchmill.services.directory.configured import ConfiguredModels
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.functions.deploying import VersionBuilder
from batchmill.services.functions.records import BUILDING, version_info
from batchmill.services.functions.versions import ModelVersions
from batchmill.states import JobState
from batchmill.store.sql.tables import jobs
from batchmill.types import Caller, DatasetSpec, Interface, Policy, Scope, Tensor
from batchmill.types.isolation import FunctionsEntry
from batchmill.wire import bundles
from batchmill.wire.bundles import Backend, DeployOrder, ModelVersion
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import TableForm

ANYBODY = Caller("default", Scope.SUBMIT)
DOUBLER = "def example_doubler(foo: int):\n    return 2 * foo\n"


class Place:
    """A data directory whose versions are tried by what a test says."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.clock = HeldClock()
        self.entry = FunctionsEntry()
        self.tried = []
        self.trouble = None  # raised by the next trial
        self.warmed, self.cold = [], None  # versions that were warmed up; raised by the next

    def open(self, left_s=math.inf):
        self.database = open_database(self.folder / "batchmill.db")
        owned = OwnedFiles(SetTerm(lambda: left_s))
        builder = VersionBuilder(self.folder, self.try_it, self.entry, owned=owned)
        models = {"of_config": ModelEntry(engine="function", source="app.py:f")}
        config = Config(data_dir=self.folder, base=self.folder, models=models)
        self.directory = ModelDirectory(ConfiguredModels(config), random.Random(7))
        self.versions = ModelVersions(self.database, self.clock, self.directory, builder=builder, warm=self.warm)
        return self.versions

    async def warm(self, old, new):
        self.warmed.append((old.function.version, new.function.version))
        if self.cold is not None:
            raise self.cold
        assert self.choose(new.name).number == int(old.function.version.partition("/")[2])

    def choose(self, name, branch=None, version="latest"):
        """The version that a call means now."""
        known = self.versions.get(name)
        who = Caller(known[0].project, Scope.SUBMIT) if known else ANYBODY
        target = self.directory.choose(who, name, branch, version)
        return next(
            each for each in self.versions.get(name) if (each.branch, each.number) == (target.branch, target.number)
        )

    async def try_it(self, spec, home, order):
        self.tried.append(spec)
        if self.trouble is not None:
            raise self.trouble
        return Interface(inputs=[Tensor("foo")])

    async def deploy(self, text=DOUBLER, name="example_doubler", by=None, **expected):
        path = self.folder / "bundle.tar.gz"
        order = DeployOrder(**{"name": name, "target": "app.py:example_doubler", "source": "app.py:fn"} | expected)
        out = io.BytesIO()
        bundles.write(out, order, {"app.py": text.encode()})
        path.write_bytes(out.getvalue())
        return await self.versions.deploy(path, by=by)

    def close(self):
        self.database.close()


@pytest.fixture
async def place(tmp_path):
    place = Place(tmp_path)
    await place.open().load()
    yield place
    place.close()


async def test_versions_are_counted_from_one(place):
    """Each deployment of other code is the next version, and `latest` stands for it."""
    first = await place.deploy()
    second = await place.deploy(DOUBLER + "# more\n")
    assert (first.version.number, second.version.number) == (1, 2)
    assert place.choose("example_doubler") == second.version
    assert place.choose("example_doubler", None, "1") == first.version
    assert second.version.reference == "example_doubler@main/2"
    assert second.version.spec.function.interface.inputs == [Tensor("foo")]
    assert (Path(second.version.spec.function.folder) / "app.py").read_text().endswith("# more\n")


async def test_the_same_again_is_nothing_new(place):
    """The same code with the same settings is the version that is there; other settings are another version."""
    first = await place.deploy()
    again = await place.deploy(source="from elsewhere")
    assert (again.is_new, again.version) == (False, first.version)
    assert (await place.deploy(workers=2)).version.number == 2


async def test_a_broken_one_is_refused_and_the_old_one_stays(place):
    """A version that does not work is written down as failed, with its traceback; `latest` stays where it was."""
    first = await place.deploy()
    place.trouble = ModelFailed("Traceback …\nZeroDivisionError: division by zero")
    with pytest.raises(ModelFailed) as caught:
        await place.deploy("1 / 0")
    assert caught.value.code == "deploy_failed" and "ZeroDivisionError" in caught.value.message
    assert place.choose("example_doubler") == first.version
    failed = place.versions.get("example_doubler")[1]
    assert (failed.state, failed.number) == ("failed", 2) and "ZeroDivisionError" in failed.error
    with pytest.raises(UnknownName, match="is failed"):
        place.choose("example_doubler", "main", "2")
    place.trouble = None
    assert (await place.deploy(DOUBLER + "#\n")).version.number == 3


async def test_versions_outlive_their_owner(place):
    """What was deployed is there for the next owner, aliases too; what was half done has failed and left nothing."""
    await place.deploy()
    await place.versions.set_alias("example_doubler", "prod", [Backend("main", 1)])
    started = asyncio.Event()

    async def hang(spec, home, order):
        started.set()
        await asyncio.Event().wait()

    place.versions._builder._trial = hang
    task = asyncio.create_task(place.deploy(DOUBLER + "#\n"))
    await started.wait()
    place.close()  # as if killed: the task never gets to write anything down
    later = place.open()
    await later.load()
    assert [each.state for each in later.get("example_doubler")] == ["ready", "failed"]
    assert place.choose("example_doubler", None, "prod").number == 1
    assert list((place.folder / "models" / "staging").glob("*")) == []
    task.cancel()
    await asyncio.wait([task])


async def test_latest_moves_once_the_new_version_is_warm(place):
    """Calls go to the old version until workers of the new one are up; if they do not come up, they stay there."""
    await place.deploy()
    await place.deploy(DOUBLER + "#\n")
    assert place.warmed == [("main/1", "main/2")]
    place.cold = ModelFailed("no room")
    with pytest.raises(ModelFailed, match="no room"):
        await place.deploy(DOUBLER + "##\n")
    assert place.choose("example_doubler").number == 2


async def test_rollback_goes_back_and_a_new_version_goes_on(place):
    """A rollback moves `latest` to an earlier version; numbers go on from the last."""
    for more in ("", "#\n", "##\n"):
        await place.deploy(DOUBLER + more)
    assert (await place.versions.rollback("example_doubler")).number == 2
    assert place.choose("example_doubler").number == 2
    assert (await place.versions.rollback("example_doubler", "main", 1)).number == 1
    with pytest.raises(InvalidInput, match="there is none to roll back to"):
        await place.versions.rollback("example_doubler")
    assert (await place.deploy(DOUBLER + "###\n")).version.number == 4


async def test_an_alias_splits_by_weight(place):
    """Calls of an alias go to its versions in the proportion of their weights; mirrors come along."""
    for more in ("", "#\n", "##\n"):
        await place.deploy(DOUBLER + more)
    backends = [Backend("main", 1, 90), Backend("main", 2, 10)]
    await place.versions.set_alias("example_doubler", "prod", backends, [Backend("main", 3)])
    chosen = [place.directory.choose(ANYBODY, "example_doubler", None, "prod") for _ in range(1000)]
    counts = Counter(each.number for each in chosen)
    assert 860 < counts[1] < 940 and counts[1] + counts[2] == 1000
    assert {mirror.function.version for each in chosen for mirror in each.mirrors} == {"main/3"}


async def test_branches_count_for_themselves(place):
    """A branch has numbers and a latest of its own, and can be merged into another."""
    await place.deploy()
    await place.deploy(DOUBLER + "#\n", branch="feat/x")
    assert place.choose("example_doubler", "feat/x").reference == "example_doubler@feat/x/1"
    merged = await place.versions.merge("example_doubler", "feat/x")
    assert merged.reference == "example_doubler@main/2"
    assert place.choose("example_doubler") == merged
    assert (Path(merged.spec.function.folder) / "app.py").read_text().endswith("#\n")


async def test_what_is_used_is_not_removed(place):
    """A version that `latest`, an alias or a job stands on stays; the rest can go, and a number is never used again."""
    for more in ("", "#\n", "##\n"):
        await place.deploy(DOUBLER + more)
    versions = place.versions
    await versions.set_alias("example_doubler", "prod", [Backend("main", 2)])
    for number in ("2", "3"):
        with pytest.raises(Conflict):
            await versions.remove("example_doubler", "main", number)
    spec = place.choose("example_doubler", None, "1").spec
    job = JobSpec("job_1", DatasetSpec(["x"]), [spec], TableForm(), Policy(), None, "", {}, 0.0)
    await place.database.write(snapshot.insert_job, job)
    with pytest.raises(Conflict, match="an unfinished job"):
        await versions.remove("example_doubler", "main", "1")
    await place.database.write(lambda db: db.execute(jobs.update().values(state="completed")))
    (gone,) = await versions.remove("example_doubler", "main", "1")
    assert gone.state == "removed" and not Path(gone.spec.function.folder).exists()
    with pytest.raises(UnknownName):
        place.choose("example_doubler", "main", "1")
    await versions.remove_alias("example_doubler", "prod")
    assert len(await versions.remove("example_doubler")) == 2
    with pytest.raises(UnknownName, match="does not exist"):
        place.choose("example_doubler")
    assert (await place.deploy()).version.number == 4


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_version_that_is_removed_while_an_order_is_taken(place, keeps):
    """The job is refused as if the version had gone before, unless its rows name other models."""
    for more in ("", "#\n"):
        await place.deploy(DOUBLER + more)
    await place.deploy(name="other")
    await place.versions.set_alias("example_doubler", "prod", [Backend("main", 2)])
    specs = [place.choose("other").spec, place.choose("example_doubler", None, "1").spec]
    job = JobSpec("job_1", DatasetSpec(["x"]), specs, TableForm(), Policy(), None, "", {}, 0.0)
    job = replace(job, used=["other"]) if keeps else job
    removing = asyncio.create_task(place.versions.remove("example_doubler", "main", "1"))
    stored = asyncio.create_task(place.database.write(job_records.enter, job, None, None))
    if keeps:
        await asyncio.gather(removing, stored)
        return
    with pytest.raises(UnknownName) as refused:
        await stored
    await removing
    with pytest.raises(UnknownName) as before:
        place.choose("example_doubler", None, "1")
    assert (refused.value.code, refused.value.message) == (before.value.code, before.value.message)
    assert "is removed; ready versions of example_doubler: main/2, @prod" in refused.value.message


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_version_that_is_removed_while_a_retry_is_taken(place, is_first):
    """What is stored first counts: the retry, and the version stays; or the removal, and the job stays as it was."""
    await place.deploy()
    spec = place.choose("example_doubler").spec
    job = JobSpec("job_1", DatasetSpec(["x"]), [spec], TableForm(), Policy(), None, "", {}, 0.0)
    await place.database.write(job_records.enter, job, None, None)
    ledger = Ledger(place.database)
    await place.database.call(ledger.move, job.id, JobState.CANCELLED, finished=1.0)
    within = partial(refuse_removed, spec=job, models=[spec])

    async def retry():
        await place.database.call(partial(ledger.open_generation, within=within), job.id, 1, {}, 0)

    async def remove():
        await place.versions.remove("example_doubler", "main", "1")

    first, second = (retry, remove) if is_first else (remove, retry)
    await first()
    with pytest.raises(Conflict if is_first else UnknownName, match="job uses" if is_first else "/1 is removed"):
        await second()
    record = ledger.job(job.id)
    assert (record["state"], record["generation"]) == (("queued", 1) if is_first else ("cancelled", 0))


@pytest.fixture
def index(tmp_path, monkeypatch):
    folder = tmp_path / "packages"
    folder.mkdir()
    add_wheel(folder, "1.0")
    use_as_index(folder, monkeypatch)
    return folder


async def test_newer_packages_are_a_new_version(place, index):
    """Requirements are resolved at every deployment: the same packages are not a new version, newer ones are."""
    first = await place.deploy(requirements="batchmill-answer-of-test\n")
    assert (await place.deploy(requirements="batchmill-answer-of-test\n")).version == first.version
    add_wheel(index, "2.0")
    second = await place.deploy(requirements="batchmill-answer-of-test\n")
    assert second.is_new and first.version.spec.python != second.version.spec.python
    shown = [version_info(each.version).packages for each in (first, second)]
    assert shown == [["batchmill-answer-of-test==1.0"], ["batchmill-answer-of-test==2.0"]]


async def test_requirements_that_cannot_be_resolved(place, index):
    """The version is stored as failed with the installer's output in its log, and the one before stays the latest."""
    first = await place.deploy(requirements="batchmill-answer-of-test\n")
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(ModelFailed, match="cannot be resolved") as caught:
        await place.deploy(requirements="batchmill-answer-of-test\n")
    assert caught.value.code == "deploy_failed"
    assert place.choose("example_doubler") == first.version
    failed = place.versions.get("example_doubler")[-1]
    assert failed.state == "failed" and "batchmill-answer-of-test" in await place.versions.log("example_doubler")


async def test_an_environment_is_built_again_from_its_lock(place, index):
    """A restart builds a missing environment with the packages that the version had, not with newer ones."""
    first = await place.deploy(requirements="batchmill-answer-of-test\n")
    add_wheel(index, "2.0")
    folder = Path(first.version.spec.python).parents[1]
    shutil.rmtree(folder.resolve())
    again = await place.versions.restart("example_doubler")
    assert again.spec.python == first.version.spec.python
    assert [each.name for each in folder.glob("lib/*/site-packages/batchmill_answer*info")] == [
        "batchmill_answer_of_test-1.0.dist-info"
    ]


async def test_nothing_is_resolved_for_who_may_not_ask(place, index):
    """A key that names an interpreter which it may not use is refused before that interpreter runs."""
    place.entry = FunctionsEntry(isolate="bubblewrap")
    place.close()
    await place.open().load()
    marker = place.folder / "ran"
    python = place.folder / "python3"
    python.write_text(f"#!/bin/sh\ntouch {marker}\n")
    python.chmod(0o755)
    with pytest.raises(Forbidden):
        await place.deploy(by=ONE, python=str(python), requirements="batchmill-answer-of-test\n")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("expected", "code"),
    [
        ({"name": "chat"}, "reserved_name"), ({"name": "a-b"}, "invalid_name"), ({"name": ""}, "invalid_name"),
        ({"name": "x" * 101}, "invalid_name"),
        ({"branch": "3"}, "invalid_branch"), ({"branch": "latest"}, "invalid_branch"),
        ({"branch": "a~b"}, "invalid_branch"), ({"branch": "../x"}, "invalid_branch"),
        ({"target": "other.py:f"}, "unknown_function"), ({"target": "../app.py:f"}, "invalid_bundle"),
        ({"workers": 0}, "invalid_order"), ({"batch_window_s": 61.0}, "invalid_order"),
        ({"environment": {"A B": "1"}}, "invalid_variable"), ({"secrets": {"KEY": "hunter2"}}, "invalid_secret"),
        ({"python": "3.99"}, "unknown_python"), ({"requirements": "-r other.txt"}, "invalid_requirements"),
    ],
)  # fmt: skip
async def test_orders_that_fit_nothing_are_refused(place, expected, code):
    """An order with a value that cannot be is refused with a code of its own, and is not a version."""
    with pytest.raises(InvalidInput) as caught:
        await place.deploy(**expected)
    assert caught.value.code == code
    assert "hunter2" not in caught.value.message
    assert all(each.state == "failed" for each in place.versions.get(expected.get("name", "example_doubler")))


async def test_names_of_the_configuration_are_taken(place):
    """A function is not called as a model of the configuration, and leaves no version behind."""
    with pytest.raises(Conflict, match="'of_config' is already the name of a model of the configuration"):
        await place.deploy(name="of_config")
    assert place.versions.get("of_config") == []


async def test_the_revision_rises_with_every_change(place):
    """Whoever remembers what a name means learns that it may mean something else."""
    seen = [place.directory.snapshot.revision]
    await place.deploy()
    seen.append(place.directory.snapshot.revision)
    await place.versions.set_alias("example_doubler", "prod", [Backend("main", 1)])
    seen.append(place.directory.snapshot.revision)
    await place.versions.remove("example_doubler")
    seen.append(place.directory.snapshot.revision)
    assert seen == sorted(set(seen))


ONE, TWO = Caller("one", Scope.DEPLOY, "key1"), Caller("two", Scope.DEPLOY, "key2")


def changes(versions, by):
    """Every change of a function, and its log, as somebody asks for it."""
    name = "example_doubler"
    return {
        "log": lambda: versions.log(name, by=by), "rollback": lambda: versions.rollback(name, by=by),
        "merge": lambda: versions.merge(name, "main", "other", by=by),
        "restart": lambda: versions.restart(name, by=by),
        "set_alias": lambda: versions.set_alias(name, "prod", [Backend("main", 1)], by=by),
        "remove_alias": lambda: versions.remove_alias(name, "prod", by=by),
        "remove": lambda: versions.remove(name, by=by),
    }  # fmt: skip


async def test_a_function_is_its_projects(place):
    """What a key deploys belongs to its project: to another it is not there, its name is taken, and none of its
    versions, aliases and logs can be had or changed."""
    first = (await place.deploy(by=ONE)).version
    assert (first.project, first.key, first.is_shared) == ("one", "key1", False)
    assert place.versions.is_hidden("example_doubler", "two") and not place.versions.is_hidden("example_doubler", "one")
    with pytest.raises(Conflict, match="^the name 'example_doubler' is taken: choose another$"):
        await place.deploy(DOUBLER + "# theirs", by=TWO)
    for what, change in changes(place.versions, TWO).items():
        with pytest.raises(UnknownName, match="example_doubler"):
            await change()
            raise AssertionError(what)
    assert place.versions.get("example_doubler") == [first]
    assert (await place.deploy(DOUBLER + "# more", by=ONE)).version.number == 2
    assert (await place.versions.rollback("example_doubler", by=ONE)).number == 1


async def test_what_is_shared_can_be_called_and_not_changed(place):
    """A function that its project shares is there for others, who are told that it is not theirs to change; the next
    version may end that."""
    await place.deploy(by=ONE, is_shared=True)
    assert not place.versions.is_hidden("example_doubler", "two")
    for what, change in changes(place.versions, TWO).items():
        with pytest.raises(Forbidden, match="belongs to another project"):
            await change()
            raise AssertionError(what)
    await place.deploy(DOUBLER + "# more", by=ONE)
    assert not place.versions.is_hidden("example_doubler", "two")
    await place.deploy(DOUBLER + "# most", by=ONE, is_shared=False)
    assert place.versions.is_hidden("example_doubler", "two")


async def test_who_runs_the_machine_may_change_every_function(place):
    """What is deployed beside the data directory is shared by default; another project's function stays that
    project's, and hidden, when it is deployed anew there."""
    own = (await place.deploy(name="theirs")).version
    assert (own.project, own.key, own.is_shared) == ("default", None, True)
    await place.deploy(by=ONE)
    mended = (await place.deploy(DOUBLER + "# mended")).version
    assert (mended.project, mended.key, mended.is_shared) == ("one", None, False)
    await place.versions.remove("example_doubler")


async def test_a_name_is_free_again_with_nothing_of_its_past(place):
    """A name whose versions are all gone can be another project's, which sees none of the versions and logs of before,
    also after the next start."""
    await place.deploy(by=ONE)
    place.trouble = ModelFailed("a secret of one")
    with pytest.raises(ModelFailed):
        await place.deploy(DOUBLER + "# bad", by=ONE)
    place.trouble = None
    await place.versions.remove("example_doubler", by=ONE)
    mine = (await place.deploy(DOUBLER + "# mine", by=TWO)).version
    place.close()
    await place.open().load()
    assert [each.number for each in place.versions.own("example_doubler", TWO)] == [mine.number]
    assert "secret" not in await place.versions.log("example_doubler", by=TWO)
    for version in ("1", "2"):
        with pytest.raises(UnknownName):
            await place.versions.log("example_doubler", None, version, by=TWO)
    with pytest.raises(UnknownName):
        await place.versions.log("example_doubler", by=ONE)


async def test_what_leads_out_of_isolation_is_not_for_keys(place):
    """Where functions are isolated, a key names an interpreter or a secret only as the configuration allows; whoever
    runs the machine names any."""
    place.entry = FunctionsEntry(isolate="bubblewrap", pythons=[sys.executable], secrets=["secret:hub-*"])
    place.close()
    await place.open().load()
    secrets = [{"KEY": reference} for reference in ("file:/data/secrets.key", "env:OWNERS", "secret:openai")]
    for case in ({"python": "/usr/bin/env"}, *[{"secrets": each} for each in secrets]):
        with pytest.raises(Forbidden, match="functions are isolated"):
            await place.deploy(by=ONE, **case)
    assert place.tried == []
    await place.deploy(by=ONE, python=sys.executable, secrets={"KEY": "secret:hub-1"})
    await place.deploy(name="other", python=sys.executable, secrets=secrets[0])
    assert [spec.python for spec in place.tried] == [sys.executable] * 2


@pytest.mark.once
async def test_an_owner_after_its_term_leaves_versions(tmp_path):
    """Another one may have a version of the same number by then."""
    left = [math.inf]
    place = Place(tmp_path)
    builder = VersionBuilder(tmp_path, place.try_it, place.entry, owned=OwnedFiles(SetTerm(lambda: left[0])))
    out = io.BytesIO()
    order = DeployOrder(name="f", target="app.py:example_doubler", source="app.py:fn")
    bundles.write(out, order, {"app.py": DOUBLER.encode()})
    (bundle := tmp_path / "bundle.tar.gz").write_bytes(out.getvalue())
    staged, version = await builder.stage(bundle), ModelVersion("f", "main", 1, BUILDING, 1.0)
    theirs = builder.folder(version) / bundles.CODE / "theirs.py"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    left[0] = 0.0
    with pytest.raises(TermOver):
        await builder.build(staged, version)
    await builder.discard(version)
    await builder.discard_failed(version)
    assert theirs.exists() and place.tried == []
    left[0] = 1.0
    await builder.build(staged, version)
    assert not theirs.exists() and len(place.tried) == 1


@pytest.mark.once
async def test_an_owner_that_was_replaced_while_it_started_sweeps_no_version(tmp_path):
    """What its successor has deployed since looks like what a crash has left, and so does what is arriving there."""
    place = Place(tmp_path)
    theirs = [tmp_path / "models" / name for name in ("versions/f/main/1/code/app.py", "staging/new.tar.gz")]
    for path in theirs:
        path.parent.mkdir(parents=True)
        path.touch()
    await place.open(left_s=0.0).load()
    assert all(path.exists() for path in theirs)
    place.database.close()
    await place.open().load()
    assert not any(path.exists() for path in theirs)
