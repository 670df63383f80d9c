"""Versions whose code is a class: their names, who may use them, and how long they stay."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.databases import open_database
from fakes.held_clock import HeldClock
from fakes.packages import add_wheel, use_as_index

from batchmill.config import Config, ProjectEntry
from batchmill.errors import Conflict, InvalidInput, ModelFailed, OverQuota, UnknownName
from batchmill.executors.validators import validators as validator_processes
from batchmill.executors.validators.messages import Checked
from batchmill.executors.validators.validators import ValidatorFailed, Validators
from batchmill.jobs.ledger import records as job_records
from batchmill.services.directory.configured import ConfiguredModels
from batchmill.services.directory.directory import ModelDirectory
from batchmill.services.functions import records
from batchmill.services.functions.deploying import VersionBuilder
from batchmill.services.functions.schema_classes import KEPT_S
from batchmill.services.functions.versions import ModelVersions
from batchmill.store.sql.tables import jobs, model_versions
from batchmill.types import (
    Caller,
    DatasetSpec,
    Interface,
    ModelSpec,
    OutputSchema,
    Policy,
    ProjectQuotas,
    Quotas,
    Scope,
)
from batchmill.wire import bundles
from batchmill.wire.bundles import SCHEMA, Deployed, DeployOrder
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.rows.forms import TableForm

ONE, TWO = (Caller(name, Scope.DEPLOY, key=f"key-{name}") for name in ("one", "two"))
CODE = "import dataclasses\n@dataclasses.dataclass\nclass A:\n    n: int\n    def __post_init__(self): {number}\n"


class Place:
    """A data directory with classes."""

    def __init__(self, folder: Path, quota: int = 10) -> None:
        self.folder, self.clock = folder, HeldClock()
        self.database = open_database(folder / "batchmill.db")
        config = Config(data_dir=folder, base=folder, projects={"two": ProjectEntry(models=["m"])})
        self.directory = ModelDirectory(ConfiguredModels(config))
        self.versions = ModelVersions(
            self.database, self.clock, self.directory, builder=VersionBuilder(folder, self.called),
            quotas=ProjectQuotas(Quotas(functions=quota)),
        )  # fmt: skip

    async def called(self, spec: ModelSpec, home: Path, order: DeployOrder) -> Interface:
        return Interface()

    async def deploy(self, number: int | str, by: Caller = ONE, code: str = CODE, **settings: Any) -> Deployed:
        order = DeployOrder(**{"name": "", "target": "a.py:A", "kind": SCHEMA, **settings})
        path, out = self.folder / "bundle.tar.gz", io.BytesIO()
        bundles.write(out, order, {"a.py": code.replace("{number}", str(number)).encode()})
        path.write_bytes(out.getvalue())
        return await self.versions.deploy(path, by=by)

    async def add_job(self, schema: OutputSchema) -> None:
        """An unfinished job that validates with a class. Raises: UnknownName."""
        form = TableForm(prompt="{n}", schema=schema)
        job = JobSpec(
            id="job_1", dataset=DatasetSpec(["in.jsonl"]), models=[ModelSpec("m", "openai", "m")], form=form,
            policy=Policy(), output=None, identity="1", code={}, created=0.0,
        )  # fmt: skip
        await self.database.write(job_records.enter, job, None, None)

    async def end_job(self, *, is_removed: bool = False) -> None:
        change = jobs.delete() if is_removed else jobs.update().values(state="completed")
        await self.database.write(lambda db: db.execute(change))

    def named(self) -> list[str]:
        return [each.reference for each in self.versions.all()]


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    made = Place(tmp_path)
    await made.versions.load()
    yield made
    made.database.close()


async def test_a_class_without_a_name_is_its_code(place: Place) -> None:
    """The same code of a project is the same version; that of another project is another, which it cannot name."""
    first, again, other = await place.deploy(1), await place.deploy(1), await place.deploy(1, TWO)
    assert first.is_new and not again.is_new and other.is_new
    assert again.version.reference == first.version.reference != other.version.reference
    assert first.version.name.startswith("schema_") and not first.version.is_shared
    found = place.versions.schema_class(ONE, first.version.name)
    assert '"additionalProperties":false' in found.document and found.validator == "a.py:A" and found.code
    # The models that a project or a key lists do not matter.
    listed = Caller("two", Scope.SUBMIT, models=frozenset({"m"}))
    assert place.versions.schema_class(listed, other.version.name).version is not None
    for caller, name in ((TWO, first.version.name), (ONE, other.version.name), (ONE, "schema_" + "0" * 20)):
        with pytest.raises(UnknownName, match="does not exist or you do not have access"):
            place.versions.schema_class(caller, name)
    with pytest.raises(InvalidInput, match="reserved name"):
        await place.deploy(1, name=first.version.name)


async def test_a_named_class_is_no_model(place: Place) -> None:
    """It has versions and aliases, and is not listed; a name is that of a class or of a function."""
    assert [(await place.deploy(n, name="review")).version.number for n in (1, 2)] == [1, 2]
    assert place.versions.schema_class(ONE, "review").version.reference == "review@main/2"
    assert place.versions.schema_class(ONE, "review@1").version.reference == "review@main/1"
    assert place.directory.list(ONE) == [] and place.directory.specs(ONE) == [] and place.versions.names() == []
    with pytest.raises(UnknownName):
        place.directory.find(ONE, "review")
    with pytest.raises(UnknownName):
        place.versions.schema_class(TWO, "review")
    with pytest.raises(Conflict, match="is the name of a schema class"):
        await place.deploy(1, name="review", kind="model")
    await place.deploy(1, name="double", kind="model")
    with pytest.raises(Conflict, match="is the name of a function"):
        await place.deploy(1, name="double")
    with pytest.raises(UnknownName, match="is a model, not a schema class"):
        place.versions.schema_class(ONE, "double")
    with pytest.raises(Conflict, match="is taken"):
        await place.deploy(1, TWO, name="review")


async def test_a_version_that_a_job_has_stays(place: Place) -> None:
    """It is not removed while the job may run; afterwards the job hears that it is gone."""
    await place.deploy(1, name="review")
    pinned = place.versions.schema_class(ONE, "review")
    await place.add_job(pinned)
    await place.deploy(2, name="review")
    with pytest.raises(Conflict, match="an unfinished job uses review@main/1"):
        await place.versions.remove("review", "main", "1", by=ONE)
    await place.versions.bring(pinned)
    await place.end_job()
    await place.versions.remove("review", "main", "1", by=ONE)
    with pytest.raises(ValidatorFailed, match="review@main/1.* was removed"):
        await place.versions.bring(pinned)
    with pytest.raises(UnknownName, match="is removed; ready versions of review: main/2"):
        place.versions.schema_class(ONE, "review@1")


async def test_a_class_that_is_removed_while_an_order_is_taken(place: Place) -> None:
    """The order is refused if the class goes between its name and the job; a job that is stored first keeps it."""
    await place.deploy(1, name="review", branch="feat/x")
    pinned = place.versions.schema_class(ONE, "review@feat/x/1")
    removing = asyncio.create_task(place.versions.remove("review", by=ONE))
    stored = asyncio.create_task(place.add_job(pinned))
    with pytest.raises(UnknownName, match="review@feat/x/1, which validates answers, was removed meanwhile"):
        await stored
    await removing
    await place.deploy(2, name="review", branch="feat/x")
    pinned = place.versions.schema_class(ONE, "review@feat/x/2")
    stored = asyncio.create_task(place.add_job(pinned))
    await asyncio.sleep(0)  # it has begun
    with pytest.raises(Conflict, match="an unfinished job uses review@feat/x/2"):
        await place.versions.remove("review", by=ONE)
    await stored
    await place.versions.bring(pinned)


async def test_classes_that_no_job_has_any_more(place: Place) -> None:
    """One without a name is removed a day after it was last deployed, but for those of jobs, also of ended ones."""
    kept, old, again = [(await place.deploy(n)).version for n in (1, 2, 3)]
    await place.deploy(1, name="review")
    await place.add_job(place.versions.schema_class(ONE, kept.name))
    await place.end_job()
    place.clock.at += KEPT_S + 1
    await place.deploy(3)  # it is used again
    await place.deploy(4)
    assert old.reference not in place.named() and not place.versions.get(old.name)[0].spec
    assert {kept.reference, again.reference, "review@main/1"} < set(place.named())
    assert not (place.folder / "models" / "versions" / old.name).exists() or not list(
        (place.folder / "models" / "versions" / old.name).rglob("a.py")
    )
    await place.end_job(is_removed=True)
    await place.deploy(5)
    assert kept.reference not in place.named() and again.reference in place.named()
    assert (await place.deploy(2)).version.number == 2  # numbers are never used again
    rows = await place.database.read(lambda db: db.execute(model_versions.select()).mappings().all())
    (row,) = [row for row in rows if (row["name"], row["number"]) == (old.name, 1)]
    assert row["spec"] is None


async def test_unused_classes_go_without_another_deployment(place: Place) -> None:
    """The owner removes them from time to time, and holds nothing for their names any more."""
    version = (await place.deploy(1)).version
    await place.versions.remove_unused()
    assert version.reference in place.named()
    place.clock.at += KEPT_S + 1
    await place.versions.remove_unused()
    assert place.named() == [] and not place.versions._locks
    assert (await place.deploy(1)).version.number == 2


async def test_deployments_beside_each_other(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one removes the other leaves alone, and so it does with what the other has just used."""
    removed, used = [(await place.deploy(n)).version for n in (1, 2)]
    place.clock.at += KEPT_S + 1
    real = place.database.read

    async def read(function: Callable[..., Any], *args: Any) -> Any:
        found = await real(function, *args)
        if function is records.read_class_uses:
            monkeypatch.undo()
            await place.deploy(2)
            await place.deploy(3)
        return found

    monkeypatch.setattr(place.database, "read", read)
    assert (await place.deploy(4)).is_new
    assert removed.reference not in place.named() and used.reference in place.named()


async def test_a_job_that_comes_and_ends_during_a_removal(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class stays, though it was in no job when the uses were read: a retry takes it."""
    version = (await place.deploy(1)).version
    pinned = place.versions.schema_class(ONE, version.name)
    place.clock.at += KEPT_S + 1
    real = place.database.read

    async def read(function: Callable[..., Any], *args: Any) -> Any:
        found = await real(function, *args)
        monkeypatch.undo()
        await place.add_job(pinned)
        await place.end_job()
        return found

    monkeypatch.setattr(place.database, "read", read)
    await place.versions.remove_unused()
    assert place.named() == [version.reference]
    await place.versions.bring(pinned)


async def test_the_quota(tmp_path: Path) -> None:
    """Classes count as versions do; those that are not needed make room."""
    place = Place(tmp_path, quota=2)
    await place.versions.load()
    await place.deploy(1)
    await place.deploy(2)
    with pytest.raises(OverQuota):
        await place.deploy(3)
    place.clock.at += KEPT_S + 1
    assert (await place.deploy(3)).is_new
    place.database.close()


# What a class of pydantic is, as far as batchmill reads it, with a package of its environment alone.
MODEL = """
import json
import batchmill_answer_of_test as package

class Validator:
    def validate_json(self, text):
        if json.loads(text)["n"] > {number}:
            raise ValueError(f"above what {package.VALUE} allows")

class A:
    __pydantic_core_schema__ = {"type": "function-plain"}
    __pydantic_validator__ = Validator()

    @classmethod
    def model_json_schema(cls):
        return {"type": "object", "properties": {"n": {"type": "integer"}}, "description": package.VALUE}
"""
PACKAGE = "batchmill-answer-of-test"


async def test_a_class_in_an_environment_of_its_own(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read and run with the packages of its version; newer ones are another version of the same class."""
    index = tmp_path / "index"
    index.mkdir()
    add_wheel(index, "1.0")
    use_as_index(index, monkeypatch)
    with pytest.raises(ModelFailed, match=r"lacks batchmill_answer_of_test. If that is a package, name it in the req"):
        await place.deploy(1, code=MODEL)
    first = await place.deploy(1, code=MODEL, requirements=PACKAGE)
    assert not (await place.deploy(1, code=MODEL, requirements=PACKAGE)).is_new
    add_wheel(index, "2.0")
    second = await place.deploy(1, code=MODEL, requirements=PACKAGE)
    assert (second.version.name, second.version.number) == (first.version.name, first.version.number + 1)
    validators = Validators(lambda: None)
    try:
        for deployed, value in ((first, "1.0"), (second, "2.0")):
            schema = place.versions.schema_class(ONE, f"{deployed.version.name}@{deployed.version.number}")
            assert f'"description":"{value}"' in schema.document
            assert schema.version is not None and str(place.folder / "environments") in (schema.version.python or "")
            assert await validators.checked(schema, b'{"n":1}') == Checked([])
            problem = f"the validator raised ValueError: above what {value} allows"
            assert await validators.checked(schema, b'{"n":2}') == Checked([problem])
    finally:
        await validators.close()
    with pytest.raises(ModelFailed, match="add msgspec to the requirements"):
        await place.deploy("pass", requirements=PACKAGE)


async def test_a_class_that_never_loads(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that hangs while it is imported is stopped, and leaves no version."""
    with monkeypatch.context() as patch, pytest.raises(ModelFailed, match="said nothing for 0.5 s and was killed"):
        patch.setattr(validator_processes, "LOAD_S", 0.5)
        await place.deploy("pass", code="import time\ntime.sleep(1000)\n")
    assert place.named() == [] and not list((place.folder / "models" / "versions").rglob("a.py"))
    with pytest.raises(ModelFailed):
        await place.deploy("pass", code="1/0\n", name="broken")
    assert "ZeroDivisionError" in (place.versions.get("broken")[0].error or "")
