"""The pages on security name every rule of the chart's roles, and its callers in the code."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from support.charts.helm_chart import Json, needs_helm, of_kind, rendered
from support.cluster.called_rights import EVERYBODYS, PACKAGE, SOURCES, calls_of

ROOT, TESTS = Path(__file__).parents[3], Path(__file__).parents[2]
SECURITY, BOUNDARIES, PERMISSIONS = (
    (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("security.md", "reference/security-table.md", "reference/permissions.md")
)
PAGE = "\n".join((BOUNDARIES, PERMISSIONS, SECURITY))
FILE = re.compile(r"`((?:kernel|backends)/[a-z_/]+\.py)`")
Rule = tuple[str, str]
"""A kind as kubectl names it, and its verbs."""


def rows(title: str) -> list[list[str]]:
    """Return the cells of the table that follows a title."""
    after = PAGE[PAGE.index(title) :]
    table = after[after.index("\n|") + 1 :].partition("\n\n")[0]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]


def told(title: str) -> list[Rule]:
    """Return the rules of a table."""
    return sorted((kind.strip("`"), verbs) for kind, verbs, *_ in rows(title))


def rules(role: Json) -> list[Rule]:
    """Return the rules of a role, one for each kind."""
    found = []
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for name in rule["resources"]:
                plural, slash, subresource = name.partition("/")
                kind = f"{plural}.{group}" if group else plural
                found.append((f"{kind}{slash}{subresource}", ", ".join(sorted(rule["verbs"]))))
    return sorted(found)


def role(objects: list[Json], kind: str, end: str) -> list[Rule]:
    (found,) = (one for one in of_kind(objects, kind) if one["metadata"]["name"].endswith(end))
    return rules(found)


@needs_helm
def test_page_names_every_rule_of_the_operator_and_where_it_holds() -> None:
    everywhere, somewhere = rendered(), rendered(settings={"namespaces": ["team-a"]})
    jobs, cluster = told("**Where jobs are**"), told("**In the cluster**")

    assert role(somewhere, "Role", "-jobs") == jobs
    assert role(somewhere, "ClusterRole", "ops-ft-finetune-operator") == cluster
    assert role(everywhere, "ClusterRole", "ops-ft-finetune-operator") == sorted(jobs + cluster)
    assert role(everywhere, "Role", "-lease") == told("**In the operator's own namespace**")


@needs_helm
def test_page_names_every_role_that_the_chart_makes_for_people() -> None:
    objects = rendered(rbac={"profileReaders": ["team-a"]})

    for name, kinds, verbs in rows("## What people get"):
        found = re.search("`…(-[a-z]+)`", name)
        assert found, name
        shown = [(kind, verbs) for kind in re.findall("`(.*?)`", kinds)]
        assert role(objects, "ClusterRole", found[1]) == sorted(shown)
    ends = {one["metadata"]["name"].rpartition("-")[2] for one in of_kind(objects, "ClusterRole")}
    assert ends - {"operator"} == {"view", "edit", "profiles"}


def callers() -> dict[str, set[str]]:
    """Return by kind the files that ask for it."""
    found = defaultdict(set)
    for path in SOURCES:
        for resource, verb, subresource in calls_of(path):
            if (resource, verb, subresource) not in EVERYBODYS:
                kind = f"{resource}/{subresource}".removesuffix("/")
                found[kind].add(path.relative_to(PACKAGE).as_posix())
    return dict(found)


def test_page_names_the_files_that_need_a_right_and_no_others() -> None:
    shown: dict[str, set[str]] = defaultdict(set)
    for title in (
        "**Where jobs are**",
        "**In the cluster**",
        "**In the operator's own namespace**",
    ):
        for kind, _, use, _ in rows(title):
            shown[kind.strip("`")] |= set(FILE.findall(use))
    asked = {kind: files for kind, files in shown.items() if files}

    assert asked == callers()


@needs_helm
@pytest.mark.parametrize("words", ["admissionPolicy.hostPaths", "rbac.profileReaders"])
def test_page_speaks_of_values_that_there_are(words: str) -> None:
    section, name = words.split(".")

    assert words in PAGE
    assert of_kind(rendered(**{section: {name: []}}), "Deployment")


def test_every_test_that_the_table_of_boundaries_names_exists() -> None:
    table = rows("## Assets and boundaries")
    assert len(table) > 20
    for asset, actor, boundary, mitigation, tests in table:
        named = re.findall(r"`([a-z0-9_/]+\.py)::(test_[a-z0-9_]+)`", tests)
        assert all((asset, actor, boundary, mitigation, named))
        for file, name in named:
            source = (TESTS / file).read_text(encoding="utf-8")
            assert f"\ndef {name}(" in source, f"{file}::{name}"


def test_policy_and_page_name_the_same_actors_and_each_other() -> None:
    policy = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    actors = re.findall(r"^\| ([A-Z][0-9]?) \|", policy, re.MULTILINE)
    introduced = BOUNDARIES[BOUNDARIES.index("Actors:") : BOUNDARIES.index("| asset |")]
    assert re.findall(r"\*\*([A-Z][0-9]?)\*\*", introduced) == actors
    assert "(docs/security.md#what-remains)" in policy
    assert "\n## What remains\n" in SECURITY
    assert "(../SECURITY.md)" in SECURITY
    assert "(../../SECURITY.md)" in BOUNDARIES
