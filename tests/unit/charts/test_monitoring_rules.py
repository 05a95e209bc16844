"""The chart's rules: known metrics, alerts in words, each tried by promtool and in the runbook."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_trainer.config.metrics import Label, Metric, MetricType
from monitoring import azure
from monitoring.generate import FILES
from monitoring.groups import alerts_of, groups, rules_of
from monitoring.known import queries
from monitoring.queries import Queries, QueryError, series_of
from monitoring.rule import RUNBOOK, Alert
from monitoring.windows import Windows, duration, iso_duration
from support.charts.played_series import PROMTOOL, needs_promtool

ROOT = Path(__file__).parents[3]
ALERTS = ROOT / "tests" / "alerts.yaml"
WINDOWS = Windows()
every_alert = pytest.mark.parametrize("alert", alerts_of(WINDOWS), ids=lambda one: one.name)

SMALL = Metric("a_total", MetricType.COUNTER, "things", "A.", (Label("kind", ("x", "y")),))


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True)


def test_rules_and_dashboards_of_the_chart_follow_from_the_code() -> None:
    command = [sys.executable, str(ROOT / "charts/monitoring/generate.py"), "--check"]
    answer = subprocess.run(command, capture_output=True, text=True)

    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")


def test_recording_rules_ask_for_what_the_catalogue_has() -> None:
    assert queries(WINDOWS).labels_of("finetunejob:mfu:ratio") == {"namespace", "finetunejob"}


@every_alert
def test_an_alert_asks_for_what_there_is_and_says_only_labels_it_has(alert: Alert) -> None:
    known = queries(WINDOWS)
    labels = known.labels_of(alert.expr)

    said = set(re.findall(r"\$labels\.(\w+)", f"{alert.summary} {alert.description}"))
    assert said <= labels
    if alert.worst is not None:
        asked = f"{alert.worst.series}{{{alert.worst.matchers}}}"
        assert known.labels_of(asked) >= {"namespace", "finetunejob", "rank", "node"}


@every_alert
def test_an_alert_says_job_rank_and_node_in_words_where_its_series_have_them(alert: Alert) -> None:
    labels = queries(WINDOWS).labels_of(alert.expr) & {"namespace", "finetunejob", "rank", "node"}
    said = set(re.findall(r"\$labels\.(namespace|finetunejob|rank|node)", alert.summary))

    assert said == (labels if "finetunejob" in labels else set())
    assert said or alert.name.startswith("FineTuneOperator")


@every_alert
def test_an_alert_has_an_entry_in_the_runbook(alert: Alert) -> None:
    page = (ROOT / "docs" / "runbook.md").read_text()
    entries = re.findall(r"^## (\w+)$", page, re.MULTILINE)

    assert entries.count(alert.name) == 1
    assert alert.runbook_url == f"{RUNBOOK}#{alert.name.lower()}"


def test_the_runbook_has_no_entry_without_an_alert() -> None:
    page = (ROOT / "docs" / "runbook.md").read_text()

    entries = re.findall(r"^## (\w+)$", page, re.MULTILINE)
    assert sorted(entries) == sorted(one.name for one in alerts_of(WINDOWS))


@needs_promtool
def test_rules_are_rules_also_with_all_times_divided(tmp_path: Path) -> None:
    from monitoring.groups import rule_file

    short = tmp_path / "rules.yaml"
    short.write_text(yaml.safe_dump(rule_file(WINDOWS.divided(30))))

    for file in (FILES / "rules.yaml", short):
        answer = promtool("check", "rules", file)
        assert answer.returncode == 0, answer.stdout + answer.stderr


@needs_promtool
def test_each_alert_fires_for_its_cause_alone_and_for_no_other_job(tmp_path: Path) -> None:
    cases: dict[str, Any] = yaml.safe_load(ALERTS.read_text())
    names = {one.name for one in alerts_of(WINDOWS)}
    assert {one["name"] for one in cases["tests"]} == names
    for case in cases["tests"]:
        (fires,) = case["alert_rule_test"]
        assert fires["alertname"] == case["name"]
        assert fires["exp_alerts"]
        case["alert_rule_test"] += [
            {"eval_time": fires["eval_time"], "alertname": other, "exp_alerts": []}
            for other in sorted(names - {case["name"]})
        ]
    cases["rule_files"] = [str(FILES / "rules.yaml")]
    whole = tmp_path / "alerts.yaml"
    whole.write_text(yaml.safe_dump(cases))

    answer = promtool("test", "rules", whole)

    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize(
    ("query", "words"),
    [
        pytest.param("rate(b_total[5m])", "b_total is not in the catalogue", id="a metric"),
        pytest.param('a_total{colour="red"}', "has no label ['colour']", id="a label"),
        pytest.param('a_total{kind="z"}', "a_total has no kind ['z']", id="a value"),
        pytest.param('a_total{kind=~"x|z"}', "a_total has no kind ['z']", id="one of two values"),
        pytest.param("sum by (size) (a_total)", "has no label ['size']", id="what to sum by"),
        pytest.param(
            'sum by (pod) (a_total) / on (kind) a_total{kind="x"}',
            "has no label ['kind']",
            id="a label that is summed away",
        ),
        pytest.param(
            "a_total / on (pod) group_left (size) a_total", "['size']", id="a label to take over"
        ),
        pytest.param(
            'label_replace(a_total, "x", "$1", "size", "(.*)")', "['size']", id="a label to copy"
        ),
    ],
)
def test_a_query_for_what_there_is_not_is_refused(query: str, words: str) -> None:
    with pytest.raises(QueryError, match=re.escape(words)):
        Queries(series_of([SMALL], frozenset({"pod"}))).labels_of(query)


def test_azure_gets_the_same_rules_within_its_limits() -> None:
    template = json.loads((FILES / "azure-rules.json").read_text())
    made = [rule for one in template["resources"] for rule in one["properties"]["rules"]]

    expressions = [one["expression"] for one in made]
    assert expressions == [rule.expr for one in groups(WINDOWS) for rule in one.rules]
    assert [one["record"] for one in made if "record" in one] == [
        one.record for one in rules_of(WINDOWS)
    ]
    for resource in template["resources"]:
        properties = resource["properties"]
        assert 0 < len(properties["rules"]) <= azure.MOST_RULES
        assert properties["interval"] == "PT1M"
    texts = [text for one in made for text in (one["expression"], *_annotations(one))]
    assert [text for text in texts if text.startswith("[")] == []  # a function of the template
    assert [text for text in texts if "query" in text] == []


def _annotations(rule: dict[str, Any]) -> list[str]:
    return list(rule.get("annotations", {}).values())


def test_azure_is_given_whole_minutes_or_nothing() -> None:
    assert iso_duration(300) == "PT5M"
    with pytest.raises(ValueError, match=r"90 s are not whole minutes"):
        iso_duration(90)
    with pytest.raises(ValueError, match="whole minutes"):
        azure.template(WINDOWS.divided(30))


def test_times_are_written_as_promql_writes_them() -> None:
    assert [duration(one) for one in (21_600, 300, 90, 10, 0.5)] == [
        "6h",
        "5m",
        "90s",
        "10s",
        "500ms",
    ]
    assert WINDOWS.divided(30).rate == 10
