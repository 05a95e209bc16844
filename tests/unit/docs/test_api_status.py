"""The page of the API status: what was added or removed since the latest release."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import api_status_page
import api_surface
from field_table import fields_below
from finetune_operator.api.crd import job_schema, profile_schema
from support.cluster.last_release import COMMIT

ROOT = Path(__file__).parents[3]
TODAY = api_surface.surface()
VERSION, BEFORE = api_surface.released()


def unnamed(removed: list[str], changelog: str, version: str = VERSION) -> list[str]:
    """Return the names that the changelog does not contain above the section of the release."""
    newer = re.split(rf"^## \[?{re.escape(version)}", changelog, flags=re.MULTILINE)[0]
    return [name for name in removed if f"`{name}`" not in newer]


def test_the_changelog_names_what_was_removed() -> None:
    assert TODAY.keys() == BEFORE.keys()
    removed = [name for kind in BEFORE for name in api_status_page.difference(BEFORE, TODAY, kind)]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert unnamed(removed, changelog) == [], "CHANGELOG.md does not name them"


def test_a_name_in_an_older_section_of_the_changelog_does_not_count() -> None:
    text = "# Changelog\n\n## 0.2.0\n\n- Changed: `a` is `b`.\n\n## 0.1.0\n\n- Added: `c`.\n"
    assert unnamed(["a", "c", "Changed"], text, "0.1.0") == ["c", "Changed"]


def test_the_page_shows_additions_and_removals() -> None:
    before = {**BEFORE, "metrics": ["finetune_gone_total"], "phases": TODAY["phases"]}
    before["FineTuneJob"] = [
        path for path in TODAY["FineTuneJob"] if path not in ("spec.suspend", "spec.output.dtype")
    ]
    text = api_status_page.page(TODAY, "9.9.9", before)
    assert "| `spec.suspend` | may change | Stop with a checkpoint and wait; " in text
    assert "| `spec.output.dtype` | stable | " in text
    assert "### Phases\n\nNone.\n" in text
    assert "## Removed since 9.9.9\n\n`Refused`, `finetune_gone_total`.\n" in text


def test_every_promise_is_about_a_field() -> None:
    for kind, paths in api_status_page.STABLE.items():
        assert [one for one in paths if not any(path.startswith(one) for path in TODAY[kind])] == []


def test_new_fields_follow_the_rules() -> None:
    schemas = {"FineTuneJob": job_schema(), "FineTuneProfile": profile_schema()}
    checked = 0
    for kind, schema in schemas.items():
        fields: dict[str, Any] = {
            f"spec.{one.path}": one.schema for one in fields_below(schema["properties"]["spec"])
        }
        for path in api_status_page.difference(TODAY, BEFORE, kind):
            if not path.startswith("spec."):
                continue
            checked += 1
            assert "default" not in fields[path], path
            is_time = re.match(r"(Time|Seconds|Interval|Duration)\b", fields[path]["description"])
            assert path.endswith("Seconds") or not is_time, path
    assert checked > 20


def git_show(path: str) -> str:
    command = ["git", "show", f"{COMMIT}:{path}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"git does not have the commit {COMMIT}")
    return found.stdout


def test_the_record_of_0_1_0_has_its_fields_metrics_and_reasons() -> None:
    record = json.loads((api_surface.FOLDER / "0.1.0.json").read_text(encoding="utf-8"))
    for kind, name in (("FineTuneJob", "finetunejobs"), ("FineTuneProfile", "finetuneprofiles")):
        definition = yaml.safe_load(git_show(f"crds/{name}.yaml"))
        schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        assert record[kind] == api_surface.field_paths(schema)
    names = re.findall(r"^\| `(\w+)`", git_show("docs/reference/metrics.md"), re.MULTILINE)
    assert record["metrics"] == sorted(set(names))
    tables = git_show("docs/status.md").partition("\n## Phases\n")[2]  # after the columns
    rows = re.findall(r"^\|(.*?)\|", tables, re.MULTILINE)
    words = {word for cell in rows for word in re.findall(r"`([A-Z]\w+)`", cell)}
    kinds = ("phases", "conditions", "reasons", "failure classes", "Events")
    assert {name for kind in kinds for name in record[kind]} == words
