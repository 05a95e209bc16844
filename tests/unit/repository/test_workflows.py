"""The workflows: what runs there can be run here, and nothing of it can be replaced by others."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PINNED = re.compile(r"uses: [\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def workflow(file: Path) -> dict[Any, Any]:
    read: dict[Any, Any] = yaml.safe_load(file.read_text())
    return read


def triggers(file: Path) -> set[str]:
    on = workflow(file)[True]  # YAML 1.1 reads the key `on` as a boolean
    return set(on)


def steps(file: Path) -> list[dict[str, Any]]:
    jobs = workflow(file)["jobs"].values()
    return [step for job in jobs for step in job.get("steps", [])]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_job_only_calls_make_targets_that_exist(file: Path) -> None:
    for step in steps(file):
        if "run" in step:
            program, target, *_ = step["run"].split()
            assert program == "make"
            assert "\n" not in step["run"]
            assert target in TARGETS


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_action_is_pinned_by_commit_and_says_its_version(file: Path) -> None:
    used = [line.strip(" -") for line in file.read_text().splitlines() if "uses: " in line]
    others = [line for line in used if not line.startswith("uses: $/.github/workflows/")]

    assert [line for line in others if not PINNED.fullmatch(line)] == []


def test_one_action_has_one_version() -> None:
    found = re.findall(r"uses: ([\w/-]+)@(\w+)", "".join(file.read_text() for file in FILES))

    assert len({name for name, _ in found}) == len(set(found))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_job_names_the_rights_it_needs_and_ends_by_itself(file: Path) -> None:
    assert workflow(file)["permissions"] == {}
    for job in workflow(file)["jobs"].values():
        assert job["permissions"]
        assert "timeout-minutes" in job or "uses" in job


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_pull_request_gets_no_secret_and_writes_nothing(file: Path) -> None:
    assert "pull_request_target" not in triggers(file)
    if "pull_request" in triggers(file):
        rights = [job["permissions"] for job in workflow(file)["jobs"].values()]
        assert all(one == {"contents": "read"} for one in rights)
        assert not re.search(r"secrets\.|github\.token|secrets: inherit", file.read_text())


def test_the_checkout_leaves_no_token_behind() -> None:
    checkouts = [
        step for file in FILES for step in steps(file) if "actions/checkout" in step.get("uses", "")
    ]

    assert all(step["with"]["persist-credentials"] is False for step in checkouts)
    assert checkouts


def test_the_whole_suite_runs_on_each_pinned_kubernetes_with_helm_3_and_4() -> None:
    matrix = workflow(FOLDER / "e2e.yml")["jobs"]["kind"]["strategy"]["matrix"]["include"]
    nodes = yaml.safe_load((ROOT / "tests" / "kind_nodes.yaml").read_text())

    assert {one["kubernetes"] for one in matrix} == set(nodes)
    assert {one["helm"].partition(".")[0] for one in matrix} == {"v3", "v4"}


def test_the_oldest_kubernetes_that_is_tried_is_the_oldest_that_the_chart_takes() -> None:
    chart = yaml.safe_load((ROOT / "charts" / "finetune-operator" / "Chart.yaml").read_text())
    nodes = yaml.safe_load((ROOT / "tests" / "kind_nodes.yaml").read_text())

    assert chart["kubeVersion"].startswith(f">={next(iter(nodes))}.0")
    for version, image in nodes.items():
        assert re.fullmatch(rf"kindest/node:v{version}\.\d+@sha256:[0-9a-f]{{64}}", image)
