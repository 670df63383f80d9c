"""Classes that validate answers: in processes of their own, whatever their code does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from batchmill.errors import InvalidInput
from batchmill.executors.validators import validators as module
from batchmill.executors.validators import waiting_answers
from batchmill.executors.validators.classes import class_schema, is_class, with_class
from batchmill.executors.validators.messages import ANSWER_S, Checked
from batchmill.executors.validators.validators import ValidatorFailed, Validators
from batchmill.executors.validators.waiting_answers import WaitingAnswers
from batchmill.models import functions
from batchmill.types import OutputSchema

CODE = """
import dataclasses, os, signal, sys, time, ctypes
import msgspec

print("loading prints")

class Review(msgspec.Struct):
    text: str
    n: int = 0

    def __post_init__(self):
        match self.text:
            case "raises":
                raise ValueError("the text is of no use")
            case "breaks":
                return {}["no such key"]
            case "prints":
                print("x" * 1_000_000)
                os.write(1, b"y" * 100_000)
                sys.stdin.read()
            case "hangs":
                time.sleep(1000)
            case "hangs for good":
                while True:
                    try:
                        time.sleep(1000)
                    except BaseException:
                        pass
            case "exits":
                sys.exit(3)
            case "ends":
                os._exit(3)
            case "crashes":
                ctypes.string_at(0)
            case "allocates":
                [bytearray(1 << 30) for _ in range(10)]
            case "returns":
                return "something else"
            case "forks":
                os.fork()
            case "leaves":
                if os.fork() == 0:
                    os.setsid()
                    with open(__file__ + ".pid", "w") as file:
                        file.write(str(os.getpid()))
                    time.sleep(1000)
                while not os.path.exists(__file__ + ".pid"):
                    pass
            case "closes":
                signal.signal(signal.SIGALRM, signal.SIG_IGN)
                os.closerange(0, 30)
                time.sleep(1000)
            case "writes":
                for fd in range(3, 30):
                    try:
                        os.write(fd, b"\\x01\\x00\\x00\\x00\\x04\\x93")
                    except OSError:
                        pass

@dataclasses.dataclass
class Data:
    low: int
    high: int

    def __post_init__(self):
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")

class Plain(msgspec.Struct):
    text: str

number = 7
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "reviews.py"
    path.write_text(CODE)
    return path


@pytest.fixture
async def validators() -> AsyncIterator[Validators]:
    made = Validators(lambda jobs: None)
    yield made
    await made.close()


def schema_of(code: Path, name: str) -> OutputSchema:
    source = f"{code}:{name}"
    return OutputSchema("{}", validator=source, code=functions.digest(source))


def runs(pid: str) -> bool:
    """Whether a process has not ended; one that nobody has reaped has."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def check(validators: Validators, schema: OutputSchema, *texts: str) -> list[Checked]:
    answers = [f'{{"text": "{text}"}}'.encode() for text in texts]
    return await asyncio.gather(*(validators.checked(schema, answer) for answer in answers))


async def test_what_code_says_is_told(validators: Validators, code: Path) -> None:
    """Errors of validation, and others by their names; what is returned or printed is nobody's concern."""
    good, raises, breaks, prints, exits, returns, last = await check(
        validators, schema_of(code, "Review"), "good", "raises", "breaks", "prints", "exits", "returns", "last"
    )
    assert good == prints == returns == last == Checked([])
    assert (raises.is_final, raises.problems) == (False, ["the text is of no use"])
    assert breaks.problems == ["the validator raised KeyError: 'no such key'"]
    assert exits.problems == ["the validator raised SystemExit: 3"]


async def test_code_that_ends_its_process_harms_no_other(
    validators: Validators, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer that it had is told so for good; those before and after it are checked."""
    monkeypatch.setattr(module, "SILENT_S", 1.5 * ANSWER_S)
    bad = ["hangs", "hangs for good", "ends", "crashes", "allocates", "writes"]
    texts = [text for each in bad for text in ("good", each, "raises")]
    found = await check(validators, schema_of(code, "Review"), *texts)
    for number, name in enumerate(bad):
        good, stopped, raises = found[3 * number : 3 * number + 3]
        assert good == Checked([]) and raises.problems == ["the text is of no use"], name
        if name != "writes":  # into a pipe of its own process: what is odd about it is a death
            assert stopped.is_final, (name, stopped)
    words = {name: found[3 * number + 1].problems for number, name in enumerate(bad)}
    assert words["hangs"] == ["the validator took more than 1 s and was stopped"]
    assert "said nothing for" in words["hangs for good"][0] and "ended by exit 3" in words["ends"][0]
    assert "ended by SIGSEGV" in words["crashes"][0] and "512 MiB of memory" in words["allocates"][0]


async def test_copies_of_a_process_answer_for_nobody(validators: Validators, code: Path) -> None:
    """Code that forks is told once; code that closes the pipes holds nobody up. A copy that leaves the group ends with
    the process."""
    schema = schema_of(code, "Review")
    for _ in range(3):
        assert [each.problems for each in await check(validators, schema, "forks", "raises")] == [
            [],
            ["the text is of no use"],
        ]
        assert await check(validators, schema, "good", "good") == [Checked([]), Checked([])]
    assert await check(validators, schema, "leaves", "good") == [Checked([]), Checked([])]
    async with asyncio.timeout(60):
        await validators.close()
    assert not runs(code.with_name("reviews.py.pid").read_text())
    async with asyncio.timeout(60):
        closes, good = await check(validators, schema, "closes", "good")
    assert closes.is_final and "closed its pipes" in closes.problems[0] and good == Checked([])


LYING = """
import json, os
data = json.dumps({"message": "x" * 5_000_000}).encode()
for fd in range(3, 30):
    try:
        os.write(fd, len(data).to_bytes(4, "little") + b"\\x02")
        for at in range(0, len(data), 4096):
            os.write(fd, data[at:at + 4096])
    except OSError:
        pass
"""


async def test_a_refusal_is_short(validators: Validators, code: Path) -> None:
    """Code that writes its own reply fills no record of a job or version."""
    code.write_text(LYING)
    with pytest.raises(ValidatorFailed) as caught:
        await validators.checked(schema_of(code, "Review"), b"{}")
    assert 0 < len(caught.value.message) <= 16 * 1024


async def test_classes_of_each_kind(validators: Validators, code: Path) -> None:
    """A dataclass; a model of pydantic with validators of a field and of the whole."""
    schema = schema_of(code, "Data")
    assert (await validators.checked(schema, b'{"low":1,"high":2}')).problems == []
    assert "low 3 is above high 2" in (await validators.checked(schema, b'{"low":3,"high":2}')).problems[0]
    pytest.importorskip("pydantic")
    model = code.with_name("models.py")
    model.write_text(
        "from typing import Annotated\n"
        "from pydantic import AfterValidator, BaseModel, field_validator, model_validator\n"
        "def even(n: int) -> int:\n    assert n % 2 == 0, f'{n} is odd'\n    return n\n"
        "class Inner(BaseModel):\n    even: Annotated[int, AfterValidator(even)]\n"
        "class Model(BaseModel):\n    label: str\n    inner: Inner\n"
        "    @field_validator('label')\n    @classmethod\n"
        "    def known(cls, v):\n        if v != 'a':\n            raise ValueError('not a')\n        return v\n"
        "    @model_validator(mode='after')\n"
        "    def whole(self):\n        if self.inner.even > 4:\n            raise ValueError('too large')\n"
        "        return self\n"
    )
    schema = await with_class(f"{model}:Model", OutputSchema(""))
    assert schema.validator == f"{model}:Model" and '"label"' in schema.document
    bad = await validators.checked(schema, b'{"label":"b","inner":{"even":3}}')
    assert bad.problems == ["/label: Value error, not a", "/inner/even: Assertion failed, 3 is odd"]
    assert (await validators.checked(schema, b'{"label":"a","inner":{"even":8}}')).problems == [
        "Value error, too large"
    ]
    assert (await validators.checked(schema, b'{"label":"a","inner":{"even":2}}')).problems == []


async def test_a_file_that_has_changed(validators: Validators, code: Path) -> None:
    """A job validates with the code that it began with, or not at all."""
    schema = schema_of(code, "Review")
    code.write_text(CODE + "\n")
    with pytest.raises(ValidatorFailed, match="has changed since the job began"):
        await validators.checked(schema, b"{}")


async def test_what_a_file_imports_is_its_code_too(validators: Validators, tmp_path: Path) -> None:
    """A module beside the file, and one that it imports in turn; what is installed is not."""
    for name, text in (
        ("answers.py", "import json, msgspec\nfrom pack import part\n\nclass A(msgspec.Struct):\n    n: int\n\n"
                       "    def __post_init__(self):\n        assert self.n <= part.MOST\n"),
        ("pack/__init__.py", ""), ("pack/part.py", "from pack.deep import MOST\n"), ("pack/deep.py", "MOST = 1\n"),
        ("other.py", ""),
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    source = f"{tmp_path}/answers.py:A"
    schema = await with_class(source, OutputSchema(""))
    (tmp_path / "other.py").write_text("# it is imported by nobody")
    assert (await with_class(source, OutputSchema(""))).code == schema.code != functions.digest(source)
    assert (await validators.checked(schema, b'{"n":1}')).problems == []
    (tmp_path / "pack" / "deep.py").write_text("MOST = 2\n")
    assert (await with_class(source, OutputSchema(""))).code != schema.code
    other = Validators(lambda: None)
    with pytest.raises(ValidatorFailed, match="has changed since the job began"):
        await other.checked(schema, b'{"n":2}')
    await other.close()


@pytest.mark.parametrize(
    ("name", "words"),
    [("Revue", "did you mean 'Review'"), ("number", "is no class"), ("Review.text", "is no class")],
)
async def test_what_is_no_class(name: str, words: str, code: Path) -> None:
    """The error names it and the way out."""
    with pytest.raises(InvalidInput, match=words) as raised:
        await with_class(f"{code}:{name}", OutputSchema(""))
    assert raised.value.code == "invalid_schema"


async def test_code_that_cannot_be_loaded(tmp_path: Path) -> None:
    """It raises, ends its process, takes all memory, or is not there."""
    cases = (
        ("1/0", "ZeroDivisionError"),
        ("import os; os._exit(4)", "ended by exit 4"),
        ("bytearray(3 << 30)", "MemoryError"),
    )
    for text, words in cases:
        path = tmp_path / "bad.py"
        path.write_text(text)
        with pytest.raises(InvalidInput, match=words):
            await with_class(f"{path}:A", OutputSchema(""))
    with pytest.raises(InvalidInput, match="cannot be read"):
        await with_class(f"{tmp_path / 'none.py'}:A", OutputSchema(""))


async def test_a_class_without_code_is_its_schema(code: Path) -> None:
    """No process validates with it."""
    plain = await class_schema("reviews.py:Plain", code.parent, OutputSchema("", 1, "x_"))
    assert (plain.validator, plain.attempts, plain.prefix) == ("", 1, "x_") and '"text"' in plain.document
    assert (await class_schema("reviews:Data", code.parent, OutputSchema(""))).validator
    names = {
        "app.py:A": True,
        "a.b:C": True,
        "d/a.b:C": True,
        "schema.json": False,
        "C:\\x.json": False,
        "app.py": False,
    }
    assert {name: is_class(name) for name in names} == names


async def test_answers_wait_in_bounds(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job whose answers wait begins no row; it goes on once half of them are validated."""
    monkeypatch.setattr(waiting_answers, "JOB_MAX", 4)
    held: list[set[str]] = []
    validators = Validators(lambda jobs: held.append(set(jobs)))
    schema = schema_of(code, "Review")
    checking = asyncio.gather(*(validators.checked(schema, b'{"text":"good"}', "job_1") for _ in range(5)))
    await asyncio.sleep(0)
    assert held == [{"job_1"}]
    await checking
    assert held == [{"job_1"}, set()]
    await validators.close()


def test_which_jobs_are_held() -> None:
    """One with its share of answers alone; where too many wait in all, each with an answer, until half of them are
    gone. What is told is told once."""
    held: list[list[str]] = []
    answers = WaitingAnswers(lambda jobs: held.append(sorted(jobs)))
    half = waiting_answers.WAITING_MAX // 2
    answers.move("slow", waiting_answers.JOB_MAX - 1, 0)
    answers.move("fast", 1, 10)
    assert held == []
    answers.move("slow", 1, 0)
    answers.move("slow", -1, 0)
    answers.move("large", 1, waiting_answers.JOB_BYTES)
    assert held == [["slow"], ["large", "slow"]]
    answers.move("slow", half, 0)
    answers.move("slower", half - 1, 0)
    assert held.pop() == ["fast", "large", "slow", "slower"]
    answers.move("fast", -1, -10)
    assert held.pop() == ["large", "slow", "slower"]
    answers.move("fast", 1, 10)
    assert held.pop() == ["fast", "large", "slow", "slower"]
    answers.move("slower", 1 - half, 0)
    assert held[-1] == ["fast", "large", "slow"]  # more than half of what may wait still do
    answers.move("slow", -(half + waiting_answers.JOB_MAX - 2), 0)
    assert held[-1] == ["large"]
    answers.move("large", -1, -waiting_answers.JOB_BYTES)
    assert held[-1] == []


async def test_answers_cross_together(validators: Validators, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that come while others are checked; after a death only those that may be its cause go alone."""
    sizes: list[int] = []
    check_all = module.ValidatorProcess.check

    async def check(self, texts, tell):
        sizes.append(len(texts))
        if len(sizes) == 2:  # as many come meanwhile
            more.extend(asyncio.ensure_future(validators.checked(schema, b'{"text":"good"}')) for _ in range(300))
        await check_all(self, texts, tell)

    more: list[asyncio.Future[Checked]] = []
    monkeypatch.setattr(module.ValidatorProcess, "check", check)
    schema = schema_of(code, "Review")
    first = [validators.checked(schema, b'{"text":"good"}') for _ in range(3)]
    await asyncio.gather(*first, *(validators.checked(schema, b'{"text":"good"}') for _ in range(400)))
    await asyncio.gather(*more)
    assert sum(sizes) == 703 and len(sizes) <= 5
    sizes.clear()
    texts = [b'{"text":"good"}'] * 5 + [b'{"text":"ends"}'] + [b'{"text":"good"}'] * 300
    await asyncio.gather(*(validators.checked(schema, text) for text in texts))
    assert sizes.count(1) <= 256 and sizes[-1] > 1


async def test_a_process_ends_with_its_worker(validators: Validators, code: Path) -> None:
    """Closed, it is gone; killed by somebody, the next answer has another."""
    schema = schema_of(code, "Review")
    await validators.checked(schema, b'{"text":"good"}')
    (each,) = validators._classes.values()
    assert each._process is not None
    os.kill(each._process._process.pid, signal.SIGKILL)
    assert [found.problems for found in await check(validators, schema, "raises", "raises")][1] == [
        "the text is of no use"
    ]


async def test_an_error_of_our_own(code: Path, monkeypatch: pytest.MonkeyPatch, validators: Validators) -> None:
    """No answer waits for ever: each is refused with the reason, and later ones are checked."""
    schema = schema_of(code, "Review")

    async def fail(*_: Any) -> None:
        raise RuntimeError("no more threads")

    with monkeypatch.context() as patched:
        patched.setattr(module.ValidatorProcess, "check", fail)
        with pytest.raises(ValidatorFailed, match="cannot validate: RuntimeError: no more threads"):
            await validators.checked(schema, b'{"text":"good"}')
    (each,) = validators._classes.values()
    with pytest.raises(RuntimeError, match="no more threads"):
        await each.work
    assert await validators.checked(schema, b'{"text":"good"}') == Checked([])


async def test_many_classes_take_turns(code: Path, monkeypatch: pytest.MonkeyPatch, validators: Validators) -> None:
    """A worker has a few processes at once, however many classes its jobs have; those without answers end."""
    monkeypatch.setattr(module, "IDLE_MAX", 1)
    monkeypatch.setattr(module, "TURN_S", 0.0)
    monkeypatch.setattr(module, "CLASSES_MAX", 3)
    validators = module.Validators(lambda jobs: None)
    monkeypatch.setattr(validators._slots, "_free", asyncio.Semaphore(2))
    running: list[int] = []
    start = module.ValidatorProcess.start

    async def counted(*words: Any) -> Any:
        found = await start(*words)
        running.append(sum(each._process is not None for each in validators._classes.values()) + 1)
        return found

    monkeypatch.setattr(module.ValidatorProcess, "start", counted)
    schemas = []
    for number in range(5):
        path = code.with_name(f"own{number}.py")
        path.write_text(CODE)
        schemas.append(schema_of(path, "Review"))
    found = await asyncio.gather(*(validators.checked(each, b'{"text":"good"}') for each in schemas for _ in range(20)))
    assert found == [Checked([])] * 100
    assert max(running) <= 2 + 1 and len(running) >= 5
    assert sum(each._process is not None for each in validators._classes.values()) <= 1
    await validators.checked(schemas[0], b'{"text":"good"}')
    await validators.close()
