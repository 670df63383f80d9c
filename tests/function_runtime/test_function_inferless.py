"""Apps as Inferless has them: schema, requests, results, batches and streams, through a real process."""

# ruff: noqa: E501

import time

import pytest

SEED_SCHEMA = """
INPUT_SCHEMA = {
    "prompt": {
        'datatype': 'STRING',
        'required': True,
        'shape': [1],
        'example': ["There is a fine house in the forest"]
    },
    'shape': {
        'datatype': 'INT8',
        'required': False,
        'example': [ 512, 1 ],
        'shape': [2]
    },
}
"""
APP = "class InferlessPythonModel:\n  def initialize(self): self.k = 2\n  def infer(self, inputs):\n    {}\n  def finalize(self): ..."


def app(drive, body, schema=None, files=None, **options):
    files = {**(files or {}), **({"input_schema.py": schema} if schema is not None else {})}
    return drive(APP.format(body), source="app.py:InferlessPythonModel", files=files, **options)


def test_the_seed_schema(drive):
    """The schema of the vendor's page gives its inputs, an example out of range included; absent inputs are absent."""
    process = app(drive, "return {'got': sorted(inputs)}", SEED_SCHEMA)
    received = process.ready()
    assert (received["takes"], received["has_schema"], received["calls"]) == ("dict", True, "row")
    assert [(i["name"], i["datatype"], i["shape"], i["required"], i["example"]) for i in received["inputs"]] == [
        ("prompt", "STRING", [1], True, ["There is a fine house in the forest"]),
        ("shape", "INT8", [2], False, [512, 1]),
    ]
    assert process.values({"prompt": ["a"]}, layout="columns", rows=1) == [{"got": ["prompt"]}]
    assert process.values([{"prompt": "a", "shape": [512, 1]}], layout="named") == [{"got": ["prompt", "shape"]}]
    _, errors = process.call([{"shape": [512, 1]}, {"prompt": 1, "other": 1}], layout="named")
    assert errors[0][0] == "missing_argument"
    assert errors[1][0] == "unknown_argument"


BAD_SCHEMAS = [
    ("{'a': {'shape': [1]}}", "Data type not specified for input --> a"),
    ("{'a': {'datatype': 'FLOAT', 'shape': [1]}}", "'FLOAT' is not a datatype"),
    ("{'a': {'datatype': 'INT8'}}", "shape not specified for input --> a"),
    ("{'a': {'datatype': 'INT8', 'shape': 1}}", "shape not specified as a python list for input --> a"),
    ("{'a': {'datatype': 'INT8', 'shape': []}}", "shape not specified as a python list for input --> a"),
    ("[]", "INPUT_SCHEMA must be a dict"),
]


@pytest.mark.parametrize(("schema", "message"), BAD_SCHEMAS)
def test_schemas_that_are_none(drive, schema, message):
    """A schema that Inferless's own command line refuses is refused in its words."""
    assert message in app(drive, "return {}", f"INPUT_SCHEMA = {schema}").refused()


RESULTS = [
    ("{'a': {'b': 1}}", "Output a is of type dictionary or tuple which is currently not supported. You can try json.dumps(a)"),
    ("{'a': (1, 2)}", "Output a is of type dictionary or tuple"),
    ("{'a': [{'b': 1}]}", "Output a is of type dictionary or tuple"),
    ("5", "infer must return a dict of outputs, not int"),
    ("None", "infer must return a dict of outputs, not NoneType"),
]  # fmt: skip


@pytest.mark.parametrize(("result", "message"), RESULTS)
def test_results_that_are_none(drive, result, message):
    """What has no place among outputs is an error of that row; the next call works."""
    process = app(drive, f"return {result} if inputs['bad'] else {{'ok': [1.5]}}")
    process.ready()
    values, errors = process.call([{"bad": True}, {"bad": False}], layout="named")
    assert values == [None, {"ok": [1.5]}]
    assert errors[0][0] == "bad_return"
    assert message in errors[0][1]


def test_the_older_json_of_inputs_and_outputs(drive):
    """input.json says the inputs; every output that output.json names must be returned."""
    files = {
        "input.json": '{"inputs": [{"name": "prompt", "shape": [1], "datatype": "BYTES", "data": ["Once"]}]}',
        "output.json": '{"outputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["Sample"]}]}',
    }
    process = app(drive, "return {'text': 'x'} if inputs['prompt'] == 'Once' else {'txt': 'x'}", files=files)
    received = process.ready()
    assert [(each["name"], each["datatype"], each["shape"]) for each in received["inputs"]] == [
        ("prompt", "STRING", [1])
    ]
    assert [each["name"] for each in received["outputs"]] == ["text"]
    values, errors = process.call([{"prompt": "Once"}, {"prompt": "b"}], layout="named")
    assert values[0] == {"text": "x"}
    assert errors[1][1] == "Output text not found in the inference response"


def test_a_broken_sample_is_refused(drive):
    """An input.json that is none is told at once."""
    assert "input.json is not" in app(drive, "return {}", files={"input.json": "[]"}).refused()


@pytest.mark.parametrize(
    ("settings", "size", "window"),
    [
        ("BATCH_SIZE = 4", 4, 0.5),
        ("BATCH_SIZE = 4\nBATCH_WINDOW = 0", 4, 0.5),
        ("BATCH_SIZE = 4\nBATCH_WINDOW = 20", 4, 0.02),
    ],
)
def test_batches(drive, settings, size, window):
    """With BATCH_SIZE, infer takes a list of dicts and returns one, and waits for its window, 500 ms by default."""
    process = app(
        drive,
        "return [{'n': len(inputs), 'a': each['a']} for each in inputs]",
        SEED_SCHEMA.replace("prompt", "a") + settings,
    )
    assert (process.ready()["calls"], process.ready_meta["interface"]["takes"]) == ("list", "rows")
    assert (process.ready_meta["batch_size"], process.ready_meta["batch_window_s"]) == (size, window)
    assert process.values([{"a": str(n)} for n in range(5)], layout="named") == [
        {"n": 4 if n < 4 else 1, "a": str(n)} for n in range(5)
    ]  # fmt: skip


def test_no_batches(drive):
    """BATCH_SIZE 0 is none at all."""
    process = app(drive, "return {'a': 1}", SEED_SCHEMA + "BATCH_SIZE = 0\nBATCH_WINDOW = 50")
    assert process.ready()["calls"] == "row"
    assert process.ready_meta["batch_window_s"] == 0


@pytest.mark.parametrize("finalize", ["def finalize(self): ...", "def finalize(self, args): open(args or 'x', 'w')"])
def test_finalize_of_either_kind(drive, tmp_path, finalize):
    """finalize may have a parameter or none."""
    code = f"class InferlessPythonModel:\n  def infer(self, inputs): return {{}}\n  {finalize}"
    process = drive(code, source="app.py:InferlessPythonModel")
    process.ready()
    assert process.stop() == 0
    assert "Traceback" not in process.log.read_text()


STREAM = """
class InferlessPythonModel:
    def infer(self, inputs, stream_output_handler):
        for n in range(inputs["n"]):
            stream_output_handler.send_streamed_output({"n": n})
        if inputs["n"] == 3:
            raise ValueError("three")
        stream_output_handler.finalise_streamed_output()
"""


def events(process, stream_id, calls, count, layout="named"):
    process.send({"kind": "open", "id": stream_id, "layout": layout, "exact": False}, [calls])
    came = []
    for _ in range(count):
        process.send({"kind": "next", "id": stream_id})
        meta, buffers = process.receive()
        assert (meta["kind"], meta["id"]) == ("piece", stream_id)
        came.append(meta["error"] or (buffers[0] if not meta["ended"] else "end"))
    return came


def test_a_handler_sends_events(drive):
    """Each event leaves when it is wanted; the end comes by itself, and an error after the events before it."""
    schema = "INPUT_SCHEMA = {'n': {'datatype': 'INT64', 'shape': [1], 'required': True}}\nIS_STREAMING_OUTPUT = True"
    process = drive(STREAM, source="app.py:InferlessPythonModel", files={"input_schema.py": schema})
    assert process.ready()["streams"]
    assert events(process, 100, b'[{"n": 2}]', 3) == [b'{"n":0}', b'{"n":1}', "end"]
    came = events(process, 101, b'[{"n": 3}]', 4)
    assert came[:3] == [b'{"n":0}', b'{"n":1}', b'{"n":2}']
    assert came[3][:2] == ["ValueError", "three"]
    assert process.values([{"n": 2}], layout="named") == [[{"n": 0}, {"n": 1}]]


def test_streams_that_nobody_reads_any_more(drive):
    """A closed stream ends its code where it waits; others and plain calls go on."""
    code = "log = []\ndef f(n):\n  try:\n    for i in range(n): yield i\n  finally: log.append(n)\ndef g(): return log"
    process = drive(code)
    process.ready()
    assert events(process, 100, b"[[5]]", 2, "positional") == [b"0", b"1"]
    assert events(process, 101, b"[[4]]", 1, "positional") == [b"0"]
    process.send({"kind": "close", "id": 100})
    process.send({"kind": "next", "id": 100})
    process.send({"kind": "next", "id": 101})
    assert process.receive()[1] == [b"1"]
    assert process.stop() == 0


@pytest.mark.parametrize("requested", [0, 1, 3])
def test_a_closed_stream_ends_a_generator_that_waits(drive, tmp_path, requested):
    """It is ended at once, whether its next event is being made, is still to be made, or was never requested."""
    place = tmp_path / "ended"
    code = (
        "import asyncio\nasync def f(n):\n  try:\n    yield n\n    await asyncio.Event().wait()\n"
        f"  finally: open({str(place)!r}, 'w').close()"
    )
    process = drive(code)
    process.ready()
    assert events(process, 100, b"[[5]]", 1, "positional") == [b"5"]
    for _ in range(requested):
        process.send({"kind": "next", "id": 100})
    process.send({"kind": "close", "id": 100})
    while not place.exists():
        time.sleep(0)
    assert process.stop() == 0


def test_a_closed_handler_ends(drive, tmp_path):
    """The code behind a handler is ended where it would send its next event."""
    place = tmp_path / "ended"
    code = STREAM.replace("        for n", "        try:\n         for n").replace(
        "            stream", "             stream"
    )
    code = code.replace(
        '        if inputs["n"] == 3',
        f'        finally: open({str(place)!r}, "w").close()\n        if inputs["n"] == 3',
    )
    process = drive(code, source="app.py:InferlessPythonModel")
    process.ready()
    assert events(process, 100, b'[{"n": 9}]', 2) == [b'{"n":0}', b'{"n":1}']
    process.send({"kind": "close", "id": 100})
    assert process.stop() == 0
    assert place.exists()


@pytest.mark.parametrize("word", ["", "async "])
def test_generators_stream(drive, word):
    """A generator answers event by event, and tells its error; an open stream holds nobody else up."""
    process = drive(f"{word}def f(n):\n  for i in range(n): yield [i]\n  if n == 2: raise ValueError('two')")
    process.ready()
    assert events(process, 100, b"[[1]]", 2, "positional") == [b"[0]", "end"]
    came = events(process, 101, b"[[2]]", 3, "positional")
    assert came[2][:2] == ["ValueError", "two"]
    assert events(process, 102, b"[[7]]", 1, "positional") == [b"[0]"]
    assert process.values([[1]]) == [[[0]]]
    process.send({"kind": "open", "id": 103, "layout": "positional", "exact": False}, [b"[[]]"])
    assert process.receive()[0]["error"][0] == "missing_argument"


@pytest.mark.parametrize("word", ["", "async "])
def test_a_function_without_events(drive, word):
    """A stream of a function that has none is refused, and the function still answers."""
    process = drive(f"{word}def f(a): return a")
    process.ready()
    process.send({"kind": "open", "id": 100, "layout": "positional", "exact": False}, [b"[[1]]"])
    meta, _ = process.receive()
    assert meta["ended"]
    assert meta["error"][0] == "invalid_argument"
    assert process.values([[1]]) == [1]


REQUEST = """
import inferless
from pydantic import BaseModel
from typing import List, Optional

@inferless.request
class RequestObjects(BaseModel):
    prompt: str
    n: int = 3
    scale: float = 0.5
    tags: List[str] = ["x"]
    seed: Optional[int] = None
    names: Optional[List[str]] = None

@inferless.response
class ResponseObjects(BaseModel):
    text: str
    note: Optional[str] = None

class InferlessPythonModel:
    def infer(self, request: RequestObjects) -> ResponseObjects:
        return ResponseObjects(text=f"{request.prompt} {request.n} {request.seed}")
"""


def test_requests_and_responses_as_classes(drive):
    """Classes of pydantic are schema, request object and response object, with the package inferless or without."""
    pytest.importorskip("pydantic")
    process = drive(REQUEST, source="app.py:InferlessPythonModel")
    received = process.ready()
    assert [(each["name"], each["datatype"], each["shape"], each["required"]) for each in received["inputs"]] == [
        ("prompt", "STRING", [1], True),
        ("n", "INT32", [1], True),
        ("scale", "FP64", [1], True),
        ("tags", "STRING", [-1], True),
        ("seed", "INT32", [1], False),
        ("names", "STRING", [-1], False),
    ]
    full = {"prompt": "a", "n": 1, "scale": 1.0, "tags": []}
    assert process.values([full], layout="named") == [{"text": "a 1 None"}]
    _, errors = process.call([{**full, "n": "many"}], layout="named")
    assert errors[0][0] == "invalid_argument"
    assert "valid integer" in errors[0][1]
