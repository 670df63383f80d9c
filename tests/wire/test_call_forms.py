"""The forms of calls by name, the form of a job's row, and the form of plain arguments."""

import json
import subprocess
import sys
from typing import Any

import pytest

from batchmill.errors import InvalidInput, ModelFailed
from batchmill.types import Interface, Tensor
from batchmill.wire.calls import CALL_FORMS, FORMS, NAMED, CallError, FunctionResults, form_of_body

ARGUMENTS = CALL_FORMS["arguments"]
ANY = Interface([Tensor("x")])


def test_every_form_of_the_table_is_there():
    """Each name stands for a form, and no other name does."""
    assert list(CALL_FORMS) == list(FORMS)
    assert all(hasattr(CALL_FORMS[name], method) for name in FORMS for method in ("read", "write", "event"))
    assert "other" not in CALL_FORMS
    assert CALL_FORMS.get("tensors") is CALL_FORMS["tensors"]


def test_numpy_is_loaded_for_tensors_only():
    """The table, and the forms of other bodies, need no numpy."""
    code = "import sys; from batchmill.wire.calls import CALL_FORMS as f; f['rows'], f['arguments']; "
    for more, loaded in (("", "False"), ("f['tensors']; ", "True")):
        done = subprocess.run(
            [sys.executable, "-c", code + more + "print('numpy' in sys.modules)"],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        assert done.stdout.strip() == loaded


@pytest.mark.parametrize(
    ("url", "fields", "inputs", "expected"),
    [
        ("/v2/models/m/infer", ["inputs"], ["inputs"], "tensors"),
        ("/v2/models/m/versions/3/infer", [], [], "tensors"),
        ("/v1/m/latest", ["data"], ["data"], "rows"),
        ("/v1/m/main/3", ["data", "timeout_seconds"], [], "rows"),
        ("/:5000/v1/m/main/3", ["data"], [], "rows"),
        ("/v1/chat/completions", ["x"], ["x"], "arguments"),
        ("/v1/chat/completions", ["data", "model"], ["x"], "rows"),
        ("/v1/chat/completions", ["data"], ["data"], "arguments"),
        ("/v1/chat/completions", ["data", "other"], ["x"], "arguments"),
        ("/v1/chat/completions", ["inputs", "id", "model"], ["x"], "tensors"),
        ("/v1/chat/completions", ["inputs"], ["inputs"], "arguments"),
        ("/v1/chat/completions", ["inputs", "other"], ["x"], "arguments"),
        ("/v1/m/latest", ["x"], ["x"], "arguments"),
    ],
)
def test_the_form_of_a_jobs_row(url: str, fields: list[str], inputs: list[str], expected: str):
    """A dialect's address decides; otherwise the fields do, and a name that the function takes is an argument."""
    assert form_of_body(url, fields, Interface([Tensor(name) for name in inputs])) == expected


def test_a_function_of_any_arguments_takes_them_all():
    """`data` and `inputs` are arguments of a function that takes any name; of an unknown one they are forms."""
    anything = Interface(takes_more=True)
    assert form_of_body("/v1/embeddings", ["data"], anything) == "arguments"
    assert form_of_body("/v1/embeddings", ["inputs"], anything) == "arguments"
    assert form_of_body("/v1/embeddings", ["inputs"]) == "tensors"


@pytest.mark.parametrize(
    ("body", "names", "calls"),
    [
        (b'{"x":1.50}', ["x"], b'[{"x":1.50}]'),
        (b'{"x":1,"model":"m","stream":true}', ["x"], b'[{"x":1}]'),
        (b'{"model":"m"}', ["model"], b'[{"model":"m"}]'),
        (b"{}", [], b"[{}]"),
    ],
)
def test_arguments_are_the_members_of_the_body(body: bytes, names: list[str], calls: bytes):
    """Values go through as they were written; `model` and `stream` only to a function that takes them."""
    request = ARGUMENTS.read(body, b"", Interface([Tensor(name) for name in names]))
    assert (request.rows, request.layout, request.calls) == (1, NAMED, calls)


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b"{", b'{"x":"\xff"}', b'{"x":' + b"[" * 9000])
def test_a_body_that_is_no_object_is_refused(body: bytes):
    """Arguments are a JSON object, or the caller's error."""
    with pytest.raises(InvalidInput):
        ARGUMENTS.read(body, b"", ANY)


def test_the_answer_is_the_result():
    """The result's own bytes are the reply, and an event's its event."""
    request = ARGUMENTS.read(b'{"x":1}', b"", ANY)
    assert ARGUMENTS.write(request, FunctionResults(b' [ {"a": 1.50} ] '), "m", "1") == (b'{"a": 1.50}', b"")
    assert ARGUMENTS.event(request, b"5", []) == b"5"


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (CallError("KeyError", "'a'", "Traceback\nKeyError: 'a'"), ModelFailed, "function_error"),
        (CallError("timeout", "slow"), ModelFailed, "timeout"),
        (CallError("worker_crashed", "gone"), ModelFailed, "worker_crashed"),
        (CallError("memory_limit", "more"), ModelFailed, "memory_limit"),
        (CallError("bad_return", "junk"), ModelFailed, "bad_return"),
        (CallError("missing_argument", "needs x"), InvalidInput, "missing_argument"),
    ],
)
def test_errors_are_whose_fault_they_are(error: CallError, kind: Any, code: str):
    """What user code raised is a function_error, what we found keeps its code, and what came wrong is the caller's."""
    with pytest.raises(kind) as caught:
        ARGUMENTS.write(ARGUMENTS.read(b"{}", b"", ANY), FunctionResults(b"[null]", errors={0: error}), "m", "1")
    assert caught.value.code == code
    assert json.dumps(caught.value.message)
