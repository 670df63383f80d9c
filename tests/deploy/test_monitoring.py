"""The dashboard and the alerts: their formats, their queries, and that every metric and label in them exists."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.deploy_files import DEPLOY, PAGE, ROOT, documents
from services.webhook_support import EndedJobs

from batchmill.server.metrics import Metrics
from batchmill.states import JobState, PauseReason

DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
TARGET_LABELS = {"job", "instance"}  # which Prometheus adds
WIDTH = 24  # columns of a Grafana dashboard
PANELS = {"row", "stat", "timeseries"}
VARIABLES = {"$__rate_interval": "5m", "$job": "batchmill", "$project": ".*", "$model": ".*", "${datasource}": "p"}
_WORDS = re.compile(r"\b(?:batchmill|process|up)(?:_[a-z0-9_]+)?\b")
_MATCHERS = re.compile(r"\{([^{}]*)\}")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"([^\"]*)\"")


def panels() -> list[dict[str, Any]]:
    return [each for each in DASHBOARD["panels"] if each["type"] != "row"]


def dashboard_queries() -> list[tuple[str, str]]:
    return [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for group in documents(ALERTS)[0]["groups"] for rule in group["rules"]]


def queries() -> list[tuple[str, str]]:
    found = [*dashboard_queries(), *((rule["alert"], rule["expr"]) for rule in alerts())]
    return [(name, filled(expression)) for name, expression in found]


def filled(expression: str) -> str:
    """An expression with values for Grafana's variables."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression, expression
    return expression


@pytest.fixture
async def labels(tmp_path: Path) -> dict[str, set[str]]:
    """Each series of the server's page -> its labels."""
    async with EndedJobs(tmp_path) as jobs:
        metrics = Metrics(jobs.database, jobs.jobs.dispatcher, jobs.outbox(), tmp_path)
        page = (await metrics.render()).decode()
        found = {name: set() for name in re.findall(r"^# TYPE (process_\w+) ", page, re.MULTILINE)}
        for family in metrics.collect():
            names = set(family._labelnames)
            endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            found |= {family.name + ending: names | ({"le"} if ending == "_bucket" else set()) for ending in endings}
    return found | {"up": set(), "batchmill_build_info": {"version", "python"}}


def metrics_of(expression: str) -> set[str]:
    bare = re.sub(r"\"[^\"]*\"|by \([^)]*\)", "", expression)
    return set(_WORDS.findall(bare))


async def test_every_metric_and_label_exists(labels: dict[str, set[str]]):
    """Each metric that a panel or an alert reads is one of the server's, and has the labels that select and group."""
    for name, expression in queries():
        named = metrics_of(expression)
        assert named and named <= set(labels), f"{name}: {named - set(labels)}"
        known = set().union(*(labels[each] for each in named)) | TARGET_LABELS
        for metric, matchers in re.findall(r"([a-z_]+)\{([^{}]*)\}", expression):
            selected = {label for label, _ in _LABEL.findall(matchers)}
            assert selected <= labels[metric] | TARGET_LABELS, f"{name}: {metric} has no {selected - labels[metric]}"
            assert 'job="batchmill"' in matchers, f"{name}: {metric} of any job"
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            assert {each.strip() for each in grouped.split(",")} <= known, f"{name}: by ({grouped})"


async def test_legends_name_labels_of_their_queries(labels: dict[str, set[str]]):
    """A legend shows labels that its query keeps."""
    for panel in panels():
        for target in panel["targets"]:
            kept = re.findall(r"by \(([^)]*)\)", target["expr"])
            named = metrics_of(filled(target["expr"]))
            known = {each.strip() for group in kept for each in group.split(",")} if kept else {"instance"}
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert shown <= known, f"{panel['title']}: {shown} of {named}"


def test_values_of_labels_exist():
    """States, reasons and results that queries compare with are those of batchmill."""
    values = {
        "state": set(JobState), "reason": set(PauseReason), "result": {"ok", "failed"}, "status": {"5.."},
    }  # fmt: skip
    for name, expression in queries():
        for matchers in _MATCHERS.findall(expression):
            for label, value in _LABEL.findall(matchers):
                assert set(value.split("|")) <= values.get(label, {value}), f"{name}: {label}={value}"


def test_what_an_operator_asks_is_on_the_dashboard():
    """Each question of the page has its panel or alert."""
    titles = {each["title"].lower() for each in panels()} | {each["alert"].lower() for each in alerts()}
    table = PAGE.split("| an operator asks | look at |")[1].split("\n\n")[0]
    for named in re.findall(r"`(Batchmill\w+)`", table):
        assert named.lower() in titles, named
    for words in (
        "rows/s by model and outcome", "failed rows by cause", "age of the oldest job", "queue by model",
        "paused jobs by reason", "live latency", "live requests/s by status", "spent per hour by project",
        "spent per hour by model", "commit latency", "database and disk", "batches at providers", "replicas",
        "workers ready", "owner",
    ):  # fmt: skip
        assert any(each.startswith(words) for each in titles), words


def test_the_dashboard_has_grafanas_structure():
    """Panels have ids of their own and places that do not overlap; every variable that is used is defined."""
    assert DASHBOARD["uid"] == "batchmill" and DASHBOARD["schemaVersion"] >= 39 and "id" not in DASHBOARD
    every = DASHBOARD["panels"]
    assert len({each["id"] for each in every}) == len(every)
    assert {each["type"] for each in every} == PANELS
    taken: set[tuple[int, int]] = set()
    for each in every:
        place = each["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < WIDTH and not cells & taken, each["title"]
        taken |= cells
    for panel in panels():
        ids = [each["refId"] for each in panel["targets"]]
        assert len(set(ids)) == len(ids) and panel["datasource"]["uid"] == "${datasource}"
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]+)", json.dumps(DASHBOARD)))
    assert used == variables
    assert all(each["query"] for each in DASHBOARD["templating"]["list"])


def test_grafana_finds_the_dashboard_and_its_data():
    """Grafana's provisioning names folders that the compose file mounts, and Prometheus by its service."""
    (compose,) = documents(DEPLOY / "compose.yaml")
    mounts = dict(each.split(":")[:2] for each in compose["services"]["grafana"]["volumes"])
    folder = DEPLOY / "compose" / "grafana"
    (source,) = documents(folder / "datasources" / "prometheus.yaml")[0]["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus"
    (provider,) = documents(folder / "dashboards" / "batchmill.yaml")[0]["providers"]
    assert mounts["./grafana"] == provider["options"]["path"]
    assert mounts["./compose/grafana"] == "/etc/grafana/provisioning"
    assert [each.name for each in (DEPLOY / "grafana").iterdir()] == ["dashboard.json"]


# -- Prometheus' own checker ------------------------------------------------------------------------------------------


def promtool(*words: str) -> str:
    program = os.environ.get("BATCHMILL_PROMTOOL") or str(ROOT / ".venv-promtool" / "promtool")
    program = program if Path(program).exists() else shutil.which("promtool") or ""
    assert program, "there is no promtool: `make promtool` gets it, and BATCHMILL_PROMTOOL may name it"
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_reads_its_configuration():
    """The configuration and the rules are Prometheus' own formats."""
    promtool("check", "config", "--syntax-only", str(DEPLOY / "prometheus" / "prometheus.yaml"))
    promtool("check", "rules", str(ALERTS))


def test_prometheus_reads_every_query_of_the_dashboard(tmp_path: Path):
    """Each query of the dashboard, as a rule, is one that Prometheus parses."""
    rules = [{"record": f"panel:{at}", "expr": filled(each)} for at, (_, each) in enumerate(dashboard_queries())]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", "--lint=none", str(tmp_path / "rules.yaml"))


def test_alerts_fire_when_they_should(tmp_path: Path):
    """Alerts fire for the metrics that alerts_test.yaml describes, and for those of a healthy server none does."""
    shutil.copy(ALERTS, tmp_path)
    shutil.copy(Path(__file__).parent / "alerts_test.yaml", tmp_path)
    promtool("test", "rules", str(tmp_path / "alerts_test.yaml"))
