"""Estimates: what is known comes out right, what is not is said."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from finished_job import quiet

from batchmill.datasets.sealing import SealOrder, seal
from batchmill.jobs.intake import estimate as estimating
from batchmill.jobs.intake.asking_again import WORDS_TOKENS_MAX, plan_notes
from batchmill.jobs.intake.estimate import ByLength, EstimateOrder, RowTokens, estimate, estimate_offloaded, tokens_of
from batchmill.jobs.intake.lengths import learn
from batchmill.jobs.ledger.plan import PlanOrder, ShardRows, make
from batchmill.types import DatasetSpec, JobView, Limits, ModelSpec, OutputSchema, Policy, Price, Request, Usage
from batchmill.wire.job_spec import JobSpec
from batchmill.wire.media_tokens import MediaTokens
from batchmill.wire.native import Estimate, EstimateRange
from batchmill.wire.rows.forms import CHAT, EMBEDDINGS, RESPONSES, Form, OpenAIForm, TableForm
from batchmill.wire.rows.rendered_rows import MediaPart

PRICE = Price(input=2.0, output=10.0)


def model(name: str = "m", **fields) -> ModelSpec:
    return ModelSpec(name=name, engine=fields.pop("engine", "http"), source=name, **fields)


def chat(number: int, text: str, **fields) -> str:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body})


def prepared(folder: Path, lines: list[str], models: list[ModelSpec], form: Form | None = None) -> EstimateOrder:
    form = OpenAIForm() if form is None else form
    dataset, plan, source = folder / "dataset", folder / "plan", folder / "in.jsonl"
    dataset.mkdir()
    plan.mkdir()
    source.write_text("".join(line + "\n" for line in lines))
    has_tokens = models[0].engine != "function"
    seal(
        SealOrder(
            DatasetSpec([str(source)]),
            form=form if isinstance(form, TableForm) and form.prompt else None,
            targets={each.name: (number, number) for number, each in enumerate(models)},
            urls=[frozenset([CHAT]) if has_tokens else None] * len(models), keys=has_tokens,
            fold="deterministic" if has_tokens else "none",
        ),
        dataset, quiet,
    )  # fmt: skip
    targets = [(number, None) for number in range(len(models))]
    make(PlanOrder(targets=targets, shard_rows=[ShardRows(64)] * len(models), keys=has_tokens), dataset, plan, quiet)
    spec = JobSpec(
        id="job_1", dataset=DatasetSpec([str(source)]), models=models, form=form, policy=Policy(), output=None,
        identity="", code={}, created=0.0,
    )  # fmt: skip
    return EstimateOrder(spec, str(dataset), str(plan))


def test_a_small_job_is_counted_whole(tmp_path):
    """When every row fits in the sample the figures are exact for the way of counting: no spread."""
    lines = [chat(n, "x" * 400, max_tokens=50) for n in range(10)]
    found = estimate(prepared(tmp_path, lines, [model(price=PRICE)]), quiet)
    assert found.input_tokens == EstimateRange(1040, 1040, 1040)
    assert found.output_tokens == EstimateRange(500, 500, 500)
    assert found.cost == EstimateRange(*[pytest.approx((1040 * 2 + 500 * 10) / 1e6)] * 3)
    assert found.cost_input == EstimateRange(*[pytest.approx(1040 * 2 / 1e6)] * 3)
    assert (found.rows, found.run, found.sampled, found.rows_unlimited) == (10, 10, 10, 0.0)
    assert "m: output tokens are the most that the rows allow; answers are often shorter" in found.notes


def finished(job_id: str, output: int, rows: int = 100, **fields) -> JobView:
    return JobView(**{
        "id": job_id, "state": "completed", "model": "m", "rows": rows, "rows_ok": rows,
        "usage": Usage(input_tokens=1, output_tokens=output), **fields,
    })  # fmt: skip


def test_lengths_are_learned_from_jobs():
    """The newest five completed jobs of a model count, by the rows that were answered; others say nothing."""
    views = [
        finished("other", 100, model="n, m"),
        finished("running", 100, state="running"),
        finished("retried", 100, generation=1),
        finished("failing", 100, rows_ok=80, rows_failed=20),
        finished("silent", 0),
        finished("folded", 900, rows_folded=10),
        finished("refused", 450, rows_ok=50, rows_failed=50, rows_rejected=50),
        finished("few_failed", 1800, rows_ok=90, rows_failed=10),
    ]
    (found,) = learn(views, ["m", "n"])
    assert (found.model, found.jobs, found.rows) == ("m", ["folded", "refused", "few_failed"], 90 + 50 + 90)
    assert (found.low, found.high, found.is_sure) == (9.0, 20.0, True)
    (found,) = learn(views[:6], ["m"])
    assert (found.low, found.mid, found.high, found.is_sure) == (5.0, 10.0, 20.0, False)
    (found,) = learn([finished(str(n), 100) for n in range(9)], ["m"])
    assert found.jobs == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(("limit", "expected"), [(50, (50, 100, 200)), (15, (50, 100, 150)), (None, (50, 100, 200))])
def test_answers_are_as_long_as_those_of_earlier_jobs(tmp_path, limit, expected):
    """Output and cost follow the earlier answers, up to the limit of the rows, and a note says from which jobs."""
    fields = {} if limit is None else {"max_tokens": limit}
    order = prepared(tmp_path, [chat(n, "x" * 400, **fields) for n in range(10)], [model(price=PRICE)])
    order = msgspec.structs.replace(order, lengths=learn([finished("job_7", 1000)], ["m"]))
    found = estimate(order, quiet)
    assert found.output_tokens == EstimateRange(*expected)
    costs = [pytest.approx((1040 * 2 + tokens * 10) / 1e6) for tokens in expected]
    assert found.cost == EstimateRange(*costs) == found.models[0].cost
    assert (found.models[0].learned_from, found.models[0].learned_rows) == (["job_7"], 100)
    most = "the rows set no limit" if limit is None else f"the rows allow {limit * 10}"
    assert (
        "m: output tokens as in 1 earlier job of 100 rows (the newest: job_7): 10.0 tokens a row; from so few jobs, it "
        f"may be half or twice as much; other prompts have other lengths; {most}"
    ) in found.notes
    assert not any("answers are often shorter" in note or "no upper bound" in note for note in found.notes)


def test_requests_of_this_work_that_have_run_are_known(tmp_path):
    """After a sample, input is what the service counted, with its chat template, and not bytes by four."""
    order = prepared(tmp_path, [chat(n, "x" * 400, max_tokens=50) for n in range(10)], [model(price=PRICE)])
    view = finished("job_7", 40, rows=4, work="w", usage=Usage(input_tokens=840, output_tokens=40))
    found = estimate(msgspec.structs.replace(order, lengths=learn([view], ["m"], "w")), quiet)
    assert (found.input_tokens.mid, found.output_tokens.mid) == (2100, 100)
    assert found.input_tokens.low < 2100 < found.input_tokens.high
    assert found.cost.mid == pytest.approx((2100 * 2 + 100 * 10) / 1e6)
    assert (found.cost_input.mid, found.models[0].counted_by) == (pytest.approx(2100 * 2 / 1e6), "the service")
    assert any("m: input and output tokens as in 4 rows of this work" in note for note in found.notes)
    assert not any("guessed" in note for note in found.notes)
    other = estimate(msgspec.structs.replace(order, lengths=learn([view], ["m"], "v")), quiet)
    assert (other.input_tokens.mid, other.models[0].counted_by) == (1040, "bytes / 4")


def test_answers_may_be_asked_for_again(tmp_path):
    """With a schema, the cost has an upper bound for when no answer fits; jobs that knew how often one did not say how
    much of it is to be expected."""
    schema = OutputSchema('{"type":"object"}', attempts=2)
    lines = [chat(n, "x" * 400, max_tokens=50) for n in range(10)]
    order = prepared(tmp_path, lines, [model(price=PRICE)], OpenAIForm(schema=schema))
    found = estimate(order, quiet)
    assert found.output_tokens == EstimateRange(500, 500, 500)
    most = Usage(3 * 1040 + 3 * (500 + 10 * WORDS_TOKENS_MAX), output_tokens=1500)
    assert found.cost_max == found.models[0].cost_max == pytest.approx(PRICE.cost(most))
    assert any("is asked for again, at most 2 times" in note and "counts once" in note for note in found.notes)
    earlier = [finished("job_7", 1200, warnings={"asked_again": 15}, rows_ok=95, rows_failed=5,
                        errors={"schema_mismatch": 5})]  # fmt: skip
    learned = estimate(msgspec.structs.replace(order, lengths=learn(earlier, ["m"])), quiet)
    assert learned.input_tokens.mid == 1040 + round(
        0.2 * (1040 + learned.output_tokens.mid / 1.2 + 10 * WORDS_TOKENS_MAX)
    )
    assert 1040 < learned.input_tokens.low < learned.input_tokens.mid < learned.input_tokens.high
    assert learned.cost.high < learned.cost_max == found.cost_max
    assert any("20.0% of 95 rows were asked for again before" in note for note in learned.notes)
    (lengths,) = learn([finished("job_8", 1200)], ["m"])
    assert lengths.asked_again is None, "it may have had no schema"
    (lengths,) = learn([finished("job_8", 1200, work="w")], ["m"], "w")
    assert lengths.asked_again == 0.0


def test_no_bound_where_answers_have_none(tmp_path):
    """Rows without a limit have no upper bound, nor do jobs that ask once need another one than their cost."""
    for name, attempts, fields in (("unlimited", 2, {}), ("once", 0, {"max_tokens": 5})):
        (tmp_path / name).mkdir()
        form = OpenAIForm(schema=OutputSchema("{}", attempts=attempts))
        order = prepared(tmp_path / name, [chat(0, "x", **fields)], [model(price=PRICE)], form)
        found = estimate(order, quiet)
        assert found.cost is not None and found.cost_max is None
        assert any("asked for again" in note for note in found.notes) == (attempts > 0)
        assert [note.rpartition(": ")[2] for note in plan_notes(order.spec)] == ["up to 3 requests a row"] * (
            attempts > 0
        )


def test_a_sample_stands_for_all_rows(tmp_path, monkeypatch):
    """From some of the rows follows a range that holds the truth about all of them."""
    monkeypatch.setattr(estimating, "SAMPLE_ROWS", 60)
    lines = [chat(n, "word " * (20 + n * 7 % 180), max_tokens=10 + n % 30) for n in range(600)]
    order = prepared(tmp_path, lines, [model(price=PRICE)])
    found = estimate(order, quiet)
    monkeypatch.setattr(estimating, "SAMPLE_ROWS", 10_000)
    truth = estimate(order, quiet)
    assert (found.sampled, truth.sampled) == (60, 600)
    assert found.input_tokens.low <= truth.input_tokens.mid <= found.input_tokens.high
    assert found.input_tokens.low < found.input_tokens.high
    assert found.output_tokens.mid == pytest.approx(truth.output_tokens.mid, rel=0.2)
    assert found.cost.low < found.cost.mid < found.cost.high


def test_the_same_job_gives_the_same_figures(tmp_path, monkeypatch):
    """The sample is drawn from the plan, not from chance."""
    monkeypatch.setattr(estimating, "SAMPLE_ROWS", 20)
    order = prepared(tmp_path, [chat(n, "y" * n) for n in range(100)], [model()])
    assert estimate(order, quiet) == estimate(order, quiet)


def test_rows_without_a_limit_are_said(tmp_path):
    """Answers without a limit have no upper bound: the share of such rows is told, and what stands for them."""
    lines = [chat(n, "x", max_tokens=10) if n % 4 else chat(n, "x") for n in range(8)]
    found = estimate(prepared(tmp_path, lines, [model()]), quiet)
    assert found.rows_unlimited == 0.25
    assert any("m: 25% of its rows set no limit" in note for note in found.notes)
    assert found.output_tokens.mid == 6 * 10 + 2 * 256
    (tmp_path / "two").mkdir()
    lines = [chat(n, "x", model="m") if n else chat(n, "x", model="n") for n in range(4)]
    order = prepared(tmp_path / "two", lines, [model(), model("n")])
    found = estimate(msgspec.structs.replace(order, lengths=learn([finished("job_7", 1000)], ["m"])), quiet)
    (note,) = [each for each in found.notes if "no upper bound" in each]
    assert note.startswith("n: 100% of its rows")  # those of the other model count as in its earlier job


def test_no_price_no_cost(tmp_path):
    """Without a price the cost is unknown, which is said, and tokens are known all the same."""
    found = estimate(prepared(tmp_path, [chat(0, "x")], [model()]), quiet)
    assert (found.cost, found.cost_input) == (None, None)
    assert found.input_tokens is not None
    assert "m has no price in the configuration: its cost is not known" in found.notes


def test_functions_have_no_tokens(tmp_path):
    """Nobody knows what a function spends: no figure is made up for it."""
    found = estimate(prepared(tmp_path, ['{"a":1}', '{"a":2}'], [model(engine="function")], TableForm()), quiet)
    assert (found.rows, found.input_tokens, found.output_tokens, found.cost, found.sampled) == (2, None, None, None, 0)
    assert any("not known before it runs" in note for note in found.notes)


def test_folded_rows_cost_nothing(tmp_path):
    """Rows that share an answer are counted once."""
    lines = [chat(n, "same", temperature=0, max_tokens=5) for n in range(10)]
    found = estimate(prepared(tmp_path, lines, [model(price=PRICE)]), quiet)
    assert (found.run, found.folded, found.output_tokens.mid) == (1, 9, 5)


def test_each_model_has_its_own_figures(tmp_path):
    """Models are estimated apart, each at its own price, and add up."""
    models = [model("cheap", price=Price(input=1)), model("dear", price=Price(input=100))]
    lines = [chat(n, "x" * 40, model="dear" if n % 2 else "cheap", max_tokens=1) for n in range(20)]
    found = estimate(prepared(tmp_path, lines, models), quiet)
    figures = [(each.model, each.rows, each.input_tokens.mid) for each in found.models]
    assert figures == [("cheap", 10, 140), ("dear", 10, 140)]
    assert found.cost.mid == pytest.approx(140 * 101 / 1e6)


def test_prompts_of_tables_are_counted_filled_in(tmp_path):
    """A table's rows count as the requests that they become."""
    form = TableForm(prompt="Say it again: {a}", system="Be brief.", params={"max_tokens": 7})
    found = estimate(prepared(tmp_path, ['{"a":"abcd"}', '{"a":"efgh"}'], [model()], form), quiet)
    per_row = 4 + -(-len("Be brief.") // 4) + 4 + -(-len("Say it again: abcd") // 4)
    assert (found.input_tokens.mid, found.output_tokens.mid) == (2 * per_row, 14)


def test_time_is_known_only_from_a_rate(tmp_path):
    """Without a measured rate the time is unknown; limits per minute say how long it takes at least."""
    limited = model(limits=Limits(requests_per_minute=60))
    order = prepared(tmp_path, [chat(n, f"x{n}") for n in range(30)], [limited])
    found = estimate(order, quiet)
    assert (found.time_s, found.time_s_min) == (None, 30.0)
    assert any("time is not known" in note for note in found.notes)
    assert estimate(msgspec.structs.replace(order, rows_per_s=3.0), quiet).time_s == 10.0


def test_token_limits_ask_for_time(tmp_path):
    """A limit of tokens per minute says how long the input alone takes."""
    limited = model(limits=Limits(tokens_per_minute=104))
    found = estimate(prepared(tmp_path, [chat(n, "x" * 400) for n in range(10)], [limited]), quiet)
    assert found.time_s_min == pytest.approx(600.0)


def test_a_sample_of_large_rows_is_cut(tmp_path, monkeypatch):
    """Large rows are not all read: the sample ends at a number of bytes, and the figures still stand for all rows."""
    monkeypatch.setattr(estimating, "SAMPLE_BYTES", 2000)
    found = estimate(prepared(tmp_path, [chat(n, "x" * 400) for n in range(50)], [model()]), quiet)
    assert found.sampled == 4
    assert found.input_tokens.mid == pytest.approx(50 * 104, rel=0.01)


def test_orders_travel_as_json(tmp_path):
    """A child process gets its order as JSON and answers in JSON."""
    order = prepared(tmp_path, [chat(0, "x")], [model(price=PRICE)])
    found = msgspec.json.decode(estimate_offloaded(msgspec.json.encode(order), quiet), type=Estimate)
    assert found == estimate(order, quiet)


@pytest.mark.parametrize(
    ("url", "body", "tokens"),
    [
        (CHAT, {"messages": [{"content": "abcd"}, {"content": [{"text": "efgh"}]}], "n": 3, "max_tokens": 2},
         RowTokens(10, 6)),
        (CHAT, {"messages": [{"content": [{"type": "image_url", "image_url": {}}]}], "max_completion_tokens": 1},
         RowTokens(4, 1, media=85 + 8 * 170)),
        (CHAT, {"messages": [{"content": [{"type": "video"}]}], "max_tokens": 1}, RowTokens(4, 1, has_others=True)),
        (RESPONSES, {"input": "abcd", "instructions": "efgh", "max_output_tokens": 9}, RowTokens(2, 9)),
        (EMBEDDINGS, {"input": ["abcd", "efghi"]}, RowTokens(3, 0)),
        (EMBEDDINGS, {"input": [[1, 2, 3], [4]]}, RowTokens(4, 0)),
        (CHAT, {"messages": [{"content": None}], "tools": [{"a": 1}]}, RowTokens(4 + 3, 256, is_unlimited=True)),
    ],
)  # fmt: skip
def test_tokens_of_a_request(url, body, tokens):
    """Every part of a prompt counts once, an answer with its limit times the answers asked for."""
    assert tokens_of(Request(url, json.dumps(body).encode()), ByLength(""), MediaTokens(model())) == tokens


def test_media_of_a_table_count_by_what_was_sealed():
    """Of a URL nothing is known before it is fetched: it counts as a large one."""
    body = {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "data:;base64,aa"}}]}]}
    request = Request(CHAT, json.dumps(body | {"max_tokens": 1}).encode())
    parts = [MediaPart("image", "image/png", 9, "aa", "/a.png", width=512, height=512)]
    counted = tokens_of(request, ByLength(""), MediaTokens(model()), parts)
    assert counted == RowTokens(4, 1, media=85 + 170)
    counted = tokens_of(request, ByLength(""), MediaTokens(model()), [MediaPart("image", url="https://a/b")])
    assert counted == RowTokens(4, 1, media=85 + 8 * 170, is_unseen=True)


def test_a_tokenizer_that_is_here_counts(tmp_path):
    """The tokenizer in the model's folder counts when its library is installed; without it the guess is said."""
    folder = Path(__file__).parents[2] / "examples" / "tiny-llm"
    own = ModelSpec(name="m", engine="llm", source=str(folder))
    found = estimate(prepared(tmp_path, [chat(0, "hello world")], [own]), quiet)
    if "tokenizers" in sys.modules:
        assert found.models[0].counted_by == "tokenizer.json"
    else:
        assert any("tokenizers is not installed" in note for note in found.notes)


def test_estimates_load_no_numpy():
    """The command line reads estimates and starts fast."""
    code = "import sys, batchmill.jobs.intake.estimate; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
