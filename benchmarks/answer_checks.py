"""The processor time of checking one reply against a schema of 20 fields, beside the same without a schema.

A reply holds 1 kB of JSON that fits. What is measured is what a worker does between its engine and its recorder; with
`--class`, also what the process does that validates with a class in Python, and what crossing to it costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from batchmill.executors.reply_checks import ReplyChecks
from batchmill.executors.validators.validators import Validators
from batchmill.models import functions
from batchmill.types import Outcome, OutputSchema, ReplyRules, Row, Usage
from batchmill.wire.rows.forms import TableForm

FIELDS, BYTES, LIMIT_US = 20, 1_000, 20.0


def schema() -> OutputSchema:
    """An object of 20 fields: texts, numbers, choices and lists."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "minLength": 1}, {"type": "number", "minimum": 0}, {"enum": ["low", "high"]},
        {"type": "array", "items": {"type": "integer"}}, {"type": "boolean"},
    ]  # fmt: skip
    properties = {f"field_{number}": kinds[number % len(kinds)] for number in range(FIELDS)}
    document = {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip
    return OutputSchema(json.dumps(document))


def reply() -> bytes:
    """A reply of /v1/chat/completions with such an object of about 1 kB."""
    values: list[Any] = ["a text of some words " * 7, 0.25, "high", list(range(20)), True]
    text = json.dumps({f"field_{number}": values[number % len(values)] for number in range(FIELDS)})
    assert 0.8 * BYTES < len(text) < 1.3 * BYTES, len(text)
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": 300, "total_tokens": 400}
    return json.dumps({"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage}).encode()


CLASSES = {  # of the same fields, with a validator of one of them
    "pydantic": """
from typing import Annotated, Literal
from pydantic import AfterValidator, BaseModel, create_model

def short(text: str) -> str:
    assert len(text) < 1000
    return text

kinds = [Annotated[str, AfterValidator(short)], float, Literal["low", "high"], list[int], bool]
Answer = create_model("Answer", **{f"field_{n}": (kinds[n % 5], ...) for n in range(20)})
""",
    "Struct": """
from typing import Literal
import msgspec

def __post_init__(self):
    assert len(self.field_0) < 1000

kinds = [str, float, Literal["low", "high"], list[int], bool]
fields = [(f"field_{n}", kinds[n % 5]) for n in range(20)]
Answer = msgspec.defstruct("Answer", fields, namespace={"__post_init__": __post_init__})
""",
}


class Kept:
    """A recorder that renders the lines of results and drops them, and a feed that hears of nothing."""

    put_block = None

    def __init__(self, form: TableForm) -> None:
        self._form, self.rows = form, 0

    def put(self, outcomes: list[Outcome]) -> None:
        assert all(outcome.error is None for outcome in outcomes)
        self._form.write_all(outcomes)
        self.rows += len(outcomes)

    def settle_checked(self, row: Row) -> None: ...


def us_a_row(form: TableForm, rows: int) -> float:
    """Microseconds of processor time of one reply."""
    kept, body = Kept(form), reply()
    checks = ReplyChecks(kept, kept, asks_again=True)  # type: ignore[arg-type]
    lease: Any = SimpleNamespace(job=SimpleNamespace(replies=ReplyRules()))
    outcomes = [Outcome(Row(at, at, b'{"text":"x"}', form, lease), body, usage=Usage(100, 0, 300)) for at in range(100)]
    checks.put(outcomes)
    began = time.process_time()
    for _ in range(rows // len(outcomes)):
        checks.put(outcomes)
    return (time.process_time() - began) / rows * 1e6


def cpu_s() -> float:
    """Of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


async def class_us(form: TableForm, rows: int) -> float:
    """Microseconds of one reply that a class validates too, without the start of its process."""
    kept, body = Kept(form), reply()
    lease: Any = SimpleNamespace(job=SimpleNamespace(id="job", replies=ReplyRules()))
    outcomes = [Outcome(Row(at, at, b'{"text":"x"}', form, lease), body, usage=Usage(100, 0, 300)) for at in range(100)]
    times = []
    held: set[str] = set()
    for count in (100, 100 + rows):  # the first has the start
        validators = Validators(lambda jobs: (held.clear(), held.update(jobs)))
        checks = ReplyChecks(kept, kept, asks_again=True, validators=validators)  # type: ignore[arg-type]
        kept.rows, began = 0, cpu_s()
        for _ in range(count // len(outcomes)):
            checks.put(outcomes)
            while held:
                await asyncio.sleep(0.001)
        while kept.rows < count:
            await asyncio.sleep(0.001)
        await validators.close()
        times.append(cpu_s() - began)
    return (times[1] - times[0]) / rows * 1e6


def with_classes(rows: int, runs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, code in CLASSES.items():
            path = Path(folder, f"{name.lower()}_answers.py")
            path.write_text(code)
            source = f"{path}:Answer"
            checked = replace(schema(), validator=source, code=functions.digest(source))
            plain, by_class = TableForm(prompt="{text}", schema=schema()), TableForm(prompt="{text}", schema=checked)
            pairs = [(us_a_row(plain, rows), asyncio.run(class_us(by_class, rows))) for _ in range(runs)]
            difference = statistics.median(b - a for a, b in pairs)
            print(f"=> a class ({name}) costs {difference:.1f} us a row more, all processes together")


def main() -> None:
    """Print the medians of both sides and their difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--class", dest="classes", action="store_true", help="also with classes in Python")
    arguments = parser.parse_args()
    plain, checked = TableForm(prompt="{text}"), TableForm(prompt="{text}", schema=schema())
    pairs = [(us_a_row(plain, arguments.rows), us_a_row(checked, arguments.rows)) for _ in range(arguments.runs)]
    without, with_schema = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(f"without a schema  {without:.1f} us a row")
    print(f"with a schema     {with_schema:.1f} us a row")
    difference = statistics.median(b - a for a, b in pairs)
    print(f"=> the schema costs {difference:.1f} us a row; the limit is {LIMIT_US:.0f}")
    if arguments.classes:
        with_classes(arguments.rows, arguments.runs)


if __name__ == "__main__":
    main()
