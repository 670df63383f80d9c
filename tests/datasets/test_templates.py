"""Templates of callers, compiled and rendered in processes that may be killed."""

import json

import pytest

from batchmill.datasets.conversion import Converted
from batchmill.datasets.line_pieces import ADDED_BYTES_MAX
from batchmill.datasets.templates import renderer as templates
from batchmill.datasets.templates.renderer import TemplateRenderer
from batchmill.errors import InvalidDataset
from batchmill.types import PromptTemplate
from batchmill.wire.rows.rendered_rows import FAULT, PROMPT, with_fault, with_prompt, without_additions

COLUMNS = ["q", "tags", "note"]
LINE_BYTES_MAX = 1024 * 1024
ENDLESS = "{{ ('a' * (2 * 10**8 + q)).replace('a', '')|length }}"  # one operation, during which no exception is raised


def rendering(text: str, *, processes: int = 1) -> TemplateRenderer:
    template = PromptTemplate(text, "ask.j2")
    return TemplateRenderer(
        template, may_be_constant=False, line_bytes_max=LINE_BYTES_MAX, processes=processes
    )  # fmt: skip


def rendered(text: str, *blocks: bytes, processes: int = 1) -> bytes:
    """Lines with their prompts, as one block."""
    with rendering(text, processes=processes) as renderer:
        renderer.check(COLUMNS)
        return b"".join(piece.data for piece in renderer.render(map(Converted, blocks), are_whole_lines=False))


def prompts(text: str, *rows: object, processes: int = 1) -> list[str]:
    """The prompt or the code of the fault of each row."""
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    members = map(json.loads, rendered(text, lines, processes=processes).splitlines())
    return [row[PROMPT] if PROMPT in row else row[FAULT][0] for row in members]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("\n{{ question }}", ["ask.j2, line 2", "'question'", "q, tags, note"]),
        ("{{ tag }}", ["line 1", "'tag'", "did you mean 'tags'?"]),
        ("{{ row.nothing }}", ["line 1", "'nothing'"]),
        ("\n\n{{ row['no thing'] }}", ["line 3", "'no thing'"]),
        ("all the same", ["line 1", "names no column", "--allow-constant-prompt"]),
        ("{% for i in range(3) %}{{ i }}{% endfor %}", ["names no column"]),
        ("{{ q }}\n{% if q %}", ["ask.j2, line 2", "endif"]),
        ("{{ q | shout }}", ["line 1", "shout"]),
        ("{{ q }}{% include 'other' %}", ["line 1", "cannot read others"]),
        ("{% import '/etc/passwd' as p %}{{ q }}", ["cannot read others"]),
        ("{% from 'x' import y %}{{ q }}", ["cannot read others"]),
        ("{% extends 'x' %}{{ q }}", ["cannot read others"]),
        ("{{ tags | random }}", ["No filter named 'random'"]),
        ("{{ lipsum() }}{{ q }}", ["'lipsum'"]),
        ("{{ q }}{{ 9 ** (9 ** 9) }}", ["more than 2 s to compile"]),
        ("{{ q }}{{" + "(" * 3000, ["cannot be compiled"]),
    ],
)
def test_a_template_that_does_not_fit_is_refused(template, words):
    """With its name, the line and what to do; nothing of it runs."""
    with rendering(template) as renderer, pytest.raises(InvalidDataset) as refused:
        renderer.check(COLUMNS)
    assert all(word in refused.value.message for word in ["ask.j2", *words]), refused.value.message


HOSTILE = {
    "attributes": ("{{ q.__class__.__mro__ }}", "template_failed"),
    "an attribute by filter": ("{{ q|attr('__class__') }}", "template_failed"),
    "globals of a function": ("{{ cycler.__init__.__globals__ }}{{ q }}", "template_failed"),
    "str.format": ("{{ '{0.__class__.__mro__}'.format(q) }}", "template_failed"),
    "str.format_map": ("{{ '{a.__class__}'.format_map({'a': q}) }}", "template_failed"),
    "a changed list": ("{{ tags.append('x') }}", "template_failed"),
    "a long range": ("{% for i in range(10**9) %}{{ q }}{% endfor %}", "template_failed"),
    "nested loops": ("{% for a in range(9999) %}{% for b in range(9999) %}{{ q[:0] }}{% endfor %}{% endfor %}",
                     "template_too_slow"),
    "a long text": ("{{ q * 10**9 }}", "template_too_large"),
    "a longer prompt than 1 MiB": ("{{ q * 2**20 }}", "template_too_large"),
    "the same in few characters of many bytes": ("{{ q }}{{ 'é' * (2**20 - 9) }}", "template_too_large"),
    "a wide text": ("{{ q|center(10**10) }}", "template_too_large"),
    "a wide number": ("{{ '%0*d'|format(10**9, q|length) }}", "template_too_large"),
    "many batches": ("{{ tags|batch(10**10, 'x')|list }}{{ q }}", "template_too_large"),
    "a power": ("{{ (q|length) and (q|length + 9) ** ((q|length + 9) ** (q|length + 9)) }}", "template_too_slow"),
    "a recursion": ("{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(q) }}", "template_failed"),
    "a generator": ("{{ q|map('upper') }}", "template_failed"),
    "what is undefined": ("{{ note.x.y }}{{ q }}", "template_failed"),
    "half a character": ("{{ q }}{{ '\\ud800' }}", "template_failed"),
}  # fmt: skip


def test_a_hostile_row_fails_alone():
    """What a template does in one row is that row's fault, whichever way it goes, and the others have their prompts."""
    cases = enumerate(HOSTILE.values())
    text = "{% if false %}" + "".join(
        f"{{% elif note == {number} %}}\n{hostile}" for number, (hostile, _) in cases
    ) + "{% else %}fine {{ q }}{% endif %}"  # fmt: skip
    rows = [{"q": "Hi", "tags": ["a"], "note": number} for number in range(len(HOSTILE) + 1)]
    found = prompts(text, *rows)
    assert dict(zip([*HOSTILE, "fine"], found, strict=True)) == {
        **{name: code for name, (_, code) in HOSTILE.items()},
        "fine": "fine Hi",
    }


def test_a_row_that_no_exception_stops_ends_its_process_alone():
    """A row whose one operation goes on for ever is killed; those before and after it, in other pieces too, go on."""
    rows = [{"q": number, "tags": [], "note": None} for number in range(600)]
    found = prompts("{% if q in (3, 290) %}" + ENDLESS + "{% endif %}{{ q }}", *rows, processes=2)
    assert [text for number, text in enumerate(found) if text != str(number)] == ["template_too_slow"] * 2
    assert found[3] == found[290] == "template_too_slow"


def test_a_template_that_is_always_slow_is_given_up(monkeypatch):
    """After so many rows the whole dataset is refused: a million would take hours."""
    monkeypatch.setattr(templates, "STOPPED_MAX", 2)
    slow = "{{ q }}{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidDataset, match="line 1.*so did many others"):
        rendered(slow, b'{"q":1}\n' * 3)
    monkeypatch.setattr(templates, "STOPPED_MAX", 1)
    with pytest.raises(InvalidDataset, match="so did many others"):
        rendered("{{ q }}" + ENDLESS, b'{"q":1}\n' * 2)


def test_what_cells_are_as_text():
    """As in `--prompt`: nothing for null, JSON for what is no text, and no escapes of HTML."""
    row = {"q": None, "tags": [1, "ä"], "note": {"a": True}}
    text = (
        "{{ q }}|{{ tags }}|{{ note }}|{{ note.a }}|{{ tags|tojson }}|{{ 1.5 }}|{{ row['tags'][1] }}|{{ '<&>'|tojson }}"
    )
    assert prompts(text, row) == ['|[1,"ä"]|{"a":true}|true|[1, "ä"]|1.5|ä|"<&>"']


def test_a_row_may_lack_a_column_where_the_template_says_so():
    """`is defined` and `default` are for rows that differ; without them the row fails."""
    row = {"q": "Hi"}
    assert prompts("{{ q }}{{ note|default('-') }}{% if tags is defined %}+{% endif %}", row) == ["Hi-"]
    assert prompts("{{ q }}{{ note }}", row) == ["template_failed"]


def test_lines_stay_as_they_are_and_in_order():
    """Blank lines, lines that are no objects, line ends and blocks that end in a line: one line for each line."""
    data = (
        b'\xef\xbb\xbf{"q":0}\r\n\n[1]\nnothing\n' + b"".join(b'{"q":%d}\n' % n for n in range(1, 900)) + b'{"q":900}'
    )
    whole = rendered("{{ q }}", data, processes=3)
    assert whole == rendered("{{ q }}", *(data[at : at + 7] for at in range(0, len(data), 7)))
    first, *middle, last = whole.split(b"\n")
    assert json.loads(first) == {"q": 0, PROMPT: "0"} and middle[:3] == [b"", b"[1]", b"nothing"]
    assert [json.loads(line)[PROMPT] for line in [*middle[3:], last]] == [str(n) for n in range(1, 901)]


def test_a_line_that_is_too_long_is_no_row(monkeypatch):
    """It has a fault, or goes through in pieces if it does not end; the next line is a row again."""
    long = json.dumps({"q": "x" * LINE_BYTES_MAX}).encode()
    assert FAULT in json.loads(rendered("{{ q }}", long + b"\n"))
    endless = b"y" * (ADDED_BYTES_MAX + LINE_BYTES_MAX + 1)
    whole = rendered("{{ q }}", endless, b"y" * 99, b'y\n{"q":1}\n')
    assert whole == endless + b"y" * 100 + b'\n{"q":1,"\\u0000prompt":"1"}\n'


def test_what_was_added_is_taken_out_again():
    """Whatever cells hold, even the name of the addition itself."""
    for row in (
        b"{}",
        b'{"a":1}',
        json.dumps({"a": f'"{PROMPT}":"', "b": "\\"}).encode(),
        b'{"\\u0000prompt":1,"a":2}',
    ):
        assert json.loads(without_additions(with_prompt(row, f'x"{PROMPT}": "'))) == json.loads(row)
        assert json.loads(without_additions(with_fault(row, "c", "m"))) == json.loads(row)
    assert without_additions(b'{"a":1}') == b'{"a":1}'
