"""Tasks: batches at a provider, each handed over once, looked at until it ends."""

from __future__ import annotations

import asyncio

import pytest
from fakes.provider_fake import HANG, LOST_REPLY, RESET, Wrong
from fakes.remote_service import RemoteService
from task_room import ANN, BOB, TaskRoom

from batchmill.cli.clients import OwnerClient
from batchmill.client.calls import typed_request
from batchmill.control import operations as own
from batchmill.control.admin import ConnectorHandlers
from batchmill.control.app import ControlApp
from batchmill.errors import Conflict, InvalidInput, InvalidTransition, RateLimited, UnknownName
from batchmill.services.remote import task_records as records
from batchmill.services.remote import tasks as remote_tasks
from batchmill.services.remote.task_records import BATCH_PREDICTION, CREATED, TaskRecord
from batchmill.services.remote.tasks import FAILURES_MAX, MODEL_POLLS_MAX, RemoteRefused
from batchmill.services.repeats import once_for

GIVEN = {"input_file_id": "file-mine"}


def order(body: bytes = b"{}", key: str | None = None, caller=ANN):
    return once_for(caller, "POST /batch", body, key, 0)


@pytest.fixture
async def service():
    async with RemoteService() as service:
        yield service


@pytest.fixture
async def room(tmp_path):
    async with TaskRoom(tmp_path) as room:
        yield room


@pytest.fixture
async def model(room, service):
    return await room.model(service.connector())


async def test_a_batch_is_handed_over(room, service, model):
    """A batch is at its provider with the caller's parameters before the reply, and its task runs from then on."""
    task = await room.tasks.predict(ANN, model, GIVEN, order())
    assert service.bodies == [{"input_file_id": "file-mine", "endpoint": "/v1/embeddings", "completion_window": "24h"}]
    assert (task.state, task.type, task.model) == ("RUNNING", "BATCH_PREDICTION", model)
    assert task.remote_job["id"] == "batch_1" and task.remote_job["dlq"] is None
    assert (await room.tasks.all(ANN))[0] == task and await room.tasks.all(BOB) == []


async def test_a_task_follows_its_batch_to_the_end(room, service, model):
    """Each look merges what the provider says; a task that has ended is told from the store."""
    task = await room.tasks.predict(ANN, model, GIVEN, order())
    seen = await room.tasks.get(ANN, task.id)
    assert (seen.state, seen.remote_job["status"]) == ("RUNNING", "validating")
    service.finish()
    seen = await room.tasks.get(ANN, task.id)
    assert (seen.state, seen.remote_job["output_file_id"]) == ("COMPLETED", "file-out")
    assert seen.remote_job["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    looks = len(service.calls)
    assert await room.tasks.get(ANN, task.id) == seen and len(service.calls) == looks


async def test_strict_polling_asks_again(tmp_path, service):
    """Where the configuration says so, the provider is asked about a task that has ended, too."""
    async with TaskRoom(tmp_path, strict_polling=True) as room:
        task = await room.tasks.predict(ANN, await room.model(service.connector()), GIVEN, order())
        service.finish()
        await room.tasks.get(ANN, task.id)
        looks = len(service.calls)
        await room.tasks.get(ANN, task.id)
        assert len(service.calls) == looks + 1


async def test_keys_that_a_reply_leaves_out_stay(room, service, model):
    """What the provider once said of a job is kept where a later reply does not say it again."""
    task = await room.tasks.predict(ANN, model, GIVEN, order())
    service.fail("GET", "/v1/batches/batch_1", Wrong(200, {"state": "somewhere"}))
    seen = await room.tasks.get(ANN, task.id)
    assert (seen.state, seen.remote_job["status"], seen.remote_job["state"]) == ("RUNNING", "validating", "somewhere")


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        (Wrong(400, {"error": {"message": "bad file"}}), 400),
        (Wrong(401, b"no"), 401),
        (Wrong(429, b"slow down"), 429),
        (Wrong(500, {"message": "runtime error"}), 500),
        (Wrong(503, b"later", {"Retry-After": "1"}), 503),
        (Wrong(400, b"x", {"x-amzn-ErrorType": "ThrottlingException:http"}), 429),
    ],
    ids=["bad", "key", "throttled", "65-error", "unavailable", "67-aws"],
)
async def test_a_provider_that_refuses_leaves_no_task(room, service, model, wrong, status):
    """What a provider answers instead of taking a batch is told with its own status, and nothing is left of it."""
    service.fail("POST", "/v1/batches", wrong)
    with pytest.raises(RemoteRefused, match="Error from remote service: ") as refused:
        await room.tasks.predict(ANN, model, GIVEN, order())
    assert refused.value.status == status
    assert await room.tasks.all(ANN) == [] and not service.jobs
    again = await room.tasks.predict(ANN, model, GIVEN, order())
    assert again.state == "RUNNING" and len(service.jobs) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        LOST_REPLY,
        Wrong(act=RESET),
        Wrong(502, b"gateway"),
        Wrong(503, b"upstream reset", keeps=True),
        Wrong(504, b"gateway", keeps=True),
        Wrong(200, b""),
    ],
    ids=["reply-lost", "reset", "bad-gateway", "unavailable-proxy", "gateway-timeout", "empty"],
)
async def test_a_lost_reply_makes_no_second_batch(room, service, model, wrong):
    """Where nobody can say whether the provider took a batch, it is not sent again until somebody has looked."""
    service.fail("POST", "/v1/batches", wrong)
    with pytest.raises(RemoteRefused) as refused:
        await room.tasks.predict(ANN, model, GIVEN, order())
    (task,) = await room.tasks.all(ANN)
    assert (task.state, task.is_unknown) == ("FAILED", True)
    assert refused.value.message in task.error and "it is unknown whether the provider accepted it" in task.error
    await room.repeats.mark_delivered(order())
    taken = len(service.jobs)
    with pytest.raises(Conflict, match=f"the same request was sent before as task {task.id}") as conflict:
        await room.tasks.predict(ANN, model, GIVEN, order())
    assert conflict.value.code == "submit_unknown" and len(service.jobs) == taken
    assert await room.tasks.get(ANN, task.id) == task
    with pytest.raises(InvalidTransition, match="no job at the provider"):
        await room.tasks.cancel(ANN, task.id)
    await room.tasks.delete(ANN, task.id)
    assert (await room.tasks.predict(ANN, model, GIVEN, order())).state == "RUNNING"


@pytest.mark.parametrize(
    "body",
    [b"[1, 2]", b'"text"', b"not json", b'{"id": "\\ud800"}', b'{"id": "b"'],
    ids=["list", "text", "nonsense", "half-character", "cut"],
)
async def test_a_reply_that_names_no_job(room, service, model, body):
    """45: a provider that takes a batch without naming its job is told so, with a task to look after; and only once."""
    service.fail("POST", "/v1/batches", Wrong(200, body))
    with pytest.raises(UnknownName, match="Unable to create batch transform job"):
        await room.tasks.predict(ANN, model, GIVEN, order())
    (task,) = await room.tasks.all(ANN)
    assert (task.state, task.remote_job) == ("FAILED", None)
    with pytest.raises(Conflict, match="it is unknown whether the provider accepted it"):
        await room.tasks.predict(ANN, model, GIVEN, order())
    assert not service.jobs


async def test_what_is_kept_of_a_job_is_bounded(room, service, model):
    """However much a provider says of a job, its id and state are kept and the rest within bounds."""
    much = {"id": "batch_9", "status": "validating", "errors": ["x" * 1000] * 200, "more": "y" * 1000}
    service.fail("POST", "/v1/batches", Wrong(200, much))
    task = await room.tasks.predict(ANN, model, GIVEN, order())
    assert task.remote_job == {"id": "batch_9", "status": "validating", "more": "y" * 1000, "dlq": None}
    for at in range(100):
        service.fail("GET", "/v1/batches/", Wrong(200, {f"key{at}": "z" * 2000}))
        task = await room.tasks.get(ANN, task.id)
    assert len(str(task.remote_job)) < 70_000 and task.remote_job["id"] == "batch_9"


async def test_a_look_does_not_bring_a_forgotten_order_back(room, service, model):
    """An order whose reply was delivered while its provider was being asked is another one afterwards."""
    first = await room.tasks.predict(ANN, model, GIVEN, order())
    looking = asyncio.ensure_future(room.tasks.get(ANN, first.id))
    while not room.tasks._polls:
        await asyncio.sleep(0)
    await room.repeats.mark_delivered(order())
    await looking
    assert (await room.tasks.predict(ANN, model, GIVEN, order())).id != first.id


async def test_repeats_join(room, service, model):
    """The same order that comes while it is on its way, or before its reply was delivered, is that task."""
    service.gate.clear()
    first = asyncio.ensure_future(room.tasks.predict(ANN, model, GIVEN, order()))
    await service.asked.wait()
    second = asyncio.ensure_future(room.tasks.predict(ANN, model, GIVEN, order()))
    other = asyncio.ensure_future(room.tasks.predict(BOB, model, GIVEN, order(caller=BOB)))
    with pytest.raises(UnknownName):
        await other
    service.gate.set()
    assert await first == await second == await room.tasks.predict(ANN, model, GIVEN, order())
    assert len(service.jobs) == 1
    await room.repeats.mark_delivered(order())
    assert (await room.tasks.predict(ANN, model, GIVEN, order())).id != (await first).id


async def test_a_key_is_one_order_for_ever(room, service, model):
    """With an Idempotency-Key an order is the same after its reply too; another order under the key is refused."""
    first = await room.tasks.predict(ANN, model, GIVEN, order(key="k"))
    await room.repeats.mark_delivered(order(key="k"))
    assert (await room.tasks.predict(ANN, model, GIVEN, order(key="k"))).id == first.id
    with pytest.raises(Conflict):
        await room.tasks.predict(ANN, model, GIVEN, order(b'{"other": 1}', key="k"))
    assert len(service.jobs) == 1


async def test_who_leaves_does_not_break_off_a_batch(room, service, model):
    """A client that goes away while its batch is handed over leaves a task that knows its job."""
    service.gate.clear()
    asking = asyncio.ensure_future(room.tasks.predict(ANN, model, GIVEN, order()))
    await service.asked.wait()
    asking.cancel()
    await asyncio.wait({asking})
    service.gate.set()
    await room.tasks.close()
    assert [each.remote_job["id"] for each in await room.tasks.all(ANN)] == ["batch_1"]


async def test_a_kill_leaves_a_task_that_says_what_to_check(room, service, model):
    """A server that died while it handed a batch over says so of the task, and sends nothing again by itself."""
    service.gate.clear()
    asking = asyncio.ensure_future(room.tasks.predict(ANN, model, GIVEN, order()))
    await service.asked.wait()
    (before,) = await room.tasks.all(ANN)
    assert before.state == "CREATED"
    with pytest.raises(InvalidTransition, match="cannot be deleted in running state"):
        await room.tasks.delete(ANN, before.id)
    asking.cancel()
    for task in list(room.tasks._submitting.values()):
        task.cancel()
    await room.reopen()
    service.gate.set()
    (task,) = await room.tasks.all(ANN)
    assert (task.id, task.state, task.is_unknown) == (before.id, "FAILED", True)
    assert "Look there for a job of this time" in task.error
    with pytest.raises(Conflict, match=task.id):
        await room.tasks.predict(ANN, model, GIVEN, order())


async def test_the_limit_is_a_true_count(tmp_path, service):
    """As many batches of a project as allowed are under way, however many that are; those that end make room."""
    async with TaskRoom(tmp_path, max_batch_inference_tasks=12) as room:
        model = await room.model(service.connector())
        for at in range(12):
            await room.tasks.predict(ANN, model, GIVEN, order(b"%d" % at))
        with pytest.raises(RateLimited, match="Exceeded maximum limit for BATCH_PREDICTION tasks") as refused:
            await room.tasks.predict(ANN, model, GIVEN, order(b"more"))
        assert refused.value.code == "too_many_batch_tasks" and len(service.jobs) == 12
        theirs = await room.model(service.connector(), BOB)
        assert (await room.tasks.predict(BOB, theirs, GIVEN, order(caller=BOB))).state == "RUNNING"
        service.jobs["batch_3"].state = "completed"
        room.clock.at += 61
        await room.tasks.poll_due()
        assert (await room.tasks.predict(ANN, model, GIVEN, order(b"more"))).state == "RUNNING"


async def test_none_may_be_allowed(tmp_path, service):
    """A limit of 0 takes no batch; neither does a server that takes none at all, and it says what to change."""
    async with TaskRoom(tmp_path, max_batch_inference_tasks=0) as room:
        with pytest.raises(RateLimited):
            await room.tasks.predict(ANN, await room.model(service.connector()), GIVEN, order())
    async with TaskRoom(tmp_path, offline_batch_inference_enabled=False) as room:
        with pytest.raises(InvalidInput, match="Offline Batch Inference is currently disabled") as refused:
            await room.tasks.predict(ANN, "any", GIVEN, order())
        assert refused.value.code == "feature_disabled"
    assert not service.jobs


async def test_tasks_are_looked_at_by_themselves(room, service, model):
    """Every minute the provider is asked about what runs; the state changes without anybody's GET."""
    task = await room.tasks.predict(ANN, model, GIVEN, order())
    request = len(service.calls)
    await room.tasks.poll_due()
    assert len(service.calls) == request, "a minute has not passed"
    service.finish()
    room.clock.at += 60
    await room.tasks.poll_due()
    (seen,) = await room.tasks.all(ANN)
    assert (seen.id, seen.state, seen.due) == (task.id, "COMPLETED", None)


async def test_a_provider_that_cannot_be_asked(room, service, model):
    """81: looks back off; the eleventh failure in a row is the last, and only a look of a user's revives the task."""
    task = await room.tasks.predict(ANN, model, GIVEN, order())
    for failures in range(1, FAILURES_MAX + 2):
        service.fail("GET", "/v1/batches/", Wrong(500))
        with_user = len(service.calls)
        room.clock.at += 16 * 60
        await room.tasks.poll_due()
        assert len(service.calls) == with_user + 1
        (seen,) = await room.tasks.all(ANN)
        assert (seen.failures, seen.remote_job["num_of_retries"]) == (failures, failures)
    assert (seen.state, seen.due) == ("UNREACHABLE", None)
    room.clock.at += 24 * 3600
    await room.tasks.poll_due()
    assert len(service.calls) == with_user + 1
    seen = await room.tasks.get(ANN, task.id)
    assert (seen.state, seen.failures) == ("RUNNING", 0) and "num_of_retries" not in seen.remote_job


async def test_a_users_look_that_fails_changes_nothing(room, service, model):
    """A GET that the provider refuses gets its status, and counts as no failure."""
    task = await room.tasks.predict(ANN, model, GIVEN, order())
    service.fail("GET", "/v1/batches/", Wrong(404, {"error": {"message": "gone"}}))
    with pytest.raises(RemoteRefused) as refused:
        await room.tasks.get(ANN, task.id)
    assert refused.value.status == 404
    assert await room.tasks.stored(ANN, task.id) == task


async def test_a_provider_that_hangs_keeps_only_its_own_waiting(room, service, model):
    """Looks through one model that never end leave room for those through others."""
    for at in range(MODEL_POLLS_MAX + 3):
        task = await room.tasks.predict(ANN, model, GIVEN, order(b"%d" % at))
        service.fail("GET", f"/v1/batches/{task.remote_job['id']}", Wrong(200, {"status": "completed"}, act=HANG))
    theirs = await room.tasks.predict(ANN, await room.model(service.connector()), GIVEN, order(b"theirs"))
    room.clock.at += 61
    looking = asyncio.ensure_future(room.tasks.poll_due())
    while (await room.tasks.stored(ANN, theirs.id)).due < room.clock.at:
        assert not looking.done()
        await asyncio.sleep(0)
    service.let_go.set()
    await looking
    assert [each.state for each in await room.tasks.all(ANN)].count("COMPLETED") == MODEL_POLLS_MAX + 3


async def test_a_look_that_breaks_is_a_failed_one(room, service, model, monkeypatch):
    """Whatever goes wrong in a look, the task is looked at again later, and so are all others."""
    task = await room.tasks.predict(ANN, model, GIVEN, order())

    def broken(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(remote_tasks, "read_remote_job", broken)
    room.clock.at += 61
    await room.tasks.poll_due()
    seen = await room.tasks.stored(ANN, task.id)
    assert (seen.state, seen.failures) == ("RUNNING", 1) and seen.due > room.clock.at


async def test_a_success_forgets_the_failures(room, service, model):
    """Ten failures, one success, ten failures: the task still runs."""
    await room.tasks.predict(ANN, model, GIVEN, order())
    for _ in range(2):
        for _ in range(FAILURES_MAX):
            service.fail("GET", "/v1/batches/", Wrong(503))
            room.clock.at += 16 * 60
            await room.tasks.poll_due()
        room.clock.at += 16 * 60
        await room.tasks.poll_due()
        (seen,) = await room.tasks.all(ANN)
        assert (seen.state, seen.failures) == ("RUNNING", 0)


async def test_a_batch_is_cancelled_at_its_provider(room, service, model):
    """The provider is asked to end the batch; the task says so at the next look, which comes at once."""
    task = await room.tasks.predict(ANN, model, GIVEN, order())
    await room.tasks.cancel(ANN, task.id)
    assert service.jobs["batch_1"].state == "cancelling"
    await room.tasks.poll_due()
    assert (await room.tasks.stored(ANN, task.id)).state == "CANCELLING"
    service.jobs["batch_1"].state = "cancelled"
    assert (await room.tasks.get(ANN, task.id)).state == "CANCELLED"
    with pytest.raises(RemoteRefused, match="Cannot cancel a batch") as refused:
        await room.tasks.cancel(ANN, task.id)
    assert refused.value.status == 409


async def test_what_cannot_be_cancelled(room, service, model):
    """61, 75: a task nobody knows, another project's, and one that is not a batch are refused in their own words."""
    task = await room.tasks.predict(ANN, model, GIVEN, order())
    for caller, task_id in ((ANN, "nobody"), (BOB, task.id)):
        with pytest.raises(UnknownName, match="^Fail to find task$"):
            await room.tasks.cancel(caller, task_id)
        with pytest.raises(UnknownName, match="^Failed to find task$"):
            await room.tasks.get(caller, task_id)
    other = await room.tasks.record(ANN, model, "REGISTER_MODEL", "COMPLETED")
    with pytest.raises(InvalidInput, match="does not have any associated batch job"):
        await room.tasks.cancel(ANN, other.id)


async def test_actions_that_a_connector_has_not(room, service):
    """21, 23: of a known provider status and cancel follow from the batch action; of another they must be given."""
    known, unknown = service.connector(), service.connector(name="other")
    for each in (known, unknown):
        each["actions"] = each["actions"][:2]
    known["parameters"]["provider"] = "openai"
    task = await room.tasks.predict(ANN, await room.model(known), GIVEN, order(b"1"))
    assert (await room.tasks.get(ANN, task.id)).remote_job["status"] == "validating"
    await room.tasks.cancel(ANN, task.id)
    assert service.jobs["batch_1"].state == "cancelling"
    task = await room.tasks.predict(ANN, await room.model(unknown), GIVEN, order(b"2"))
    with pytest.raises(InvalidInput, match="configure the action type to get the batch job details in the connector"):
        await room.tasks.get(ANN, task.id)
    with pytest.raises(InvalidInput, match="configure the action type to cancel the batch job in the connector"):
        await room.tasks.cancel(ANN, task.id)


async def test_a_model_without_a_batch_action(room, service):
    """A connector that has no batch_predict says so, and no task is left."""
    connector = service.connector()
    connector["actions"] = connector["actions"][:1]
    with pytest.raises(InvalidInput, match="no BATCH_PREDICT action found"):
        await room.tasks.predict(ANN, await room.model(connector), GIVEN, order())
    assert await room.tasks.all(ANN) == []


async def test_a_model_that_is_gone(room, service, model):
    """A task that has ended outlives its model: it is told as it was, and no provider is asked to cancel it."""
    task = await room.tasks.predict(ANN, model, GIVEN, order())
    service.finish()
    await room.tasks.get(ANN, task.id)
    await room.models.undeploy(ANN, model)
    await room.models.delete(ANN, model)
    assert (await room.tasks.get(ANN, task.id)).state == "COMPLETED"
    with pytest.raises(UnknownName, match="Failed to retrieve the ML model for the given task ID"):
        await room.tasks.cancel(ANN, task.id)


async def test_a_running_task_stays(room, service, model):
    """A task that runs is not deleted, one that has ended is; the provider's job is left alone."""
    task = await room.tasks.predict(ANN, model, GIVEN, order())
    with pytest.raises(InvalidTransition, match="Task cannot be deleted in running state. Try after some time."):
        await room.tasks.delete(ANN, task.id)
    service.finish()
    await room.tasks.get(ANN, task.id)
    with pytest.raises(UnknownName):
        await room.tasks.delete(BOB, task.id)
    await room.tasks.delete(ANN, task.id)
    with pytest.raises(UnknownName, match="Failed to find task"):
        await room.tasks.get(ANN, task.id)
    assert list(service.jobs) == ["batch_1"]


async def test_a_restart_goes_on(room, service, model):
    """Tasks, their failures and their limits are there after a restart; the credential still reaches the provider."""
    task = await room.tasks.predict(ANN, model, GIVEN, order())
    await room.reopen()
    assert await room.tasks.stored(ANN, task.id) == task
    service.finish()
    assert (await room.tasks.get(ANN, task.id)).state == "COMPLETED"


async def test_a_forced_end_cancels_first(room, service, model):
    """A connector that is deleted with its models has the provider cancel what runs; where it does not, all stays."""
    client = OwnerClient(ControlApp(ConnectorHandlers(room.remote).handlers()))
    connector = room.models.get(ANN, model).connector
    task = await room.tasks.predict(ANN, model, GIVEN, order())
    with pytest.raises(Conflict, match=task.id):
        await room.models.undeploy(ANN, model)
    service.fail("POST", "/cancel", Wrong(500, b"no"))
    with pytest.raises(Conflict, match=task.id):
        await client.call(typed_request(own.DELETE_CONNECTOR, connector, with_models=True))
    assert room.models.get(ANN, model).is_deployed
    await client.call(typed_request(own.DELETE_CONNECTOR, connector, with_models=True))
    assert service.jobs["batch_1"].state == "cancelling"
    assert (await room.tasks.get(ANN, task.id)).state == "CANCELLED"
    with pytest.raises(UnknownName):
        room.models.get(ANN, model)


async def test_no_batch_begins_with_a_model_that_is_gone(room):
    """A batch that was ordered just before its model was deleted is not handed over."""
    task = TaskRecord("t", "ann", "gone", BATCH_PREDICTION, CREATED, 0.0, 0.0)
    with pytest.raises(UnknownName, match="was deleted"):
        await room.database.write(records.insert_batch, task, 10, 10)
    assert await room.tasks.all(ANN) == []


async def test_what_waits_for_a_place_is_refused(room, service):
    """As many calls go through a connector at once as may; another waits for its `connection_timeout`."""
    config = {"connection_timeout": 1}
    model = await room.model(service.connector(client_config=config))
    service.gate.clear()
    places = [asyncio.create_task(room.tasks.predict(ANN, model, GIVEN, order(b"%d" % n, str(n)))) for n in range(16)]
    while len(service.bodies) < len(places):
        await asyncio.sleep(0)
    with pytest.raises(RateLimited, match="Acquire operation took longer"):
        await room.tasks.predict(ANN, model, GIVEN, order(b"more", "more"))
    service.gate.set()
    assert len(await asyncio.gather(*places)) == 16
