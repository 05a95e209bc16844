"""docs/build_site.py: links that leave docs/, and addresses of pages that moved."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[3] / "docs" / "build_site.py"
SOURCE = "https://github.com/finetune-operator/finetune-operator"
build_site = SimpleNamespace(**runpy.run_path(str(SCRIPT)))


@pytest.mark.parametrize(
    ("page", "target", "expected"),
    [
        pytest.param("status.md", "runbook.md#lost-nodes", None, id="a page"),
        pytest.param("how-to/jobs.md", "../status.md", None, id="a page of another folder"),
        pytest.param("tutorial.md", "ftctl-run.svg", None, id="a picture"),
        pytest.param("status.md", "#columns", None, id="an anchor of the page"),
        pytest.param("status.md", "https://example.com/a.py", None, id="another host"),
        pytest.param("missing.md", "gone.md", None, id="a missing page, which the build refuses"),
        pytest.param("architecture.md", "decisions", "decisions/index.md", id="all decisions"),
        pytest.param("index.md", "../README.md#state", "blob/abc/README.md#state", id="README"),
        pytest.param(
            "how-to/jobs.md",
            "../../examples/07-kubernetes.yaml",
            "blob/abc/examples/07-kubernetes.yaml",
            id="an example",
        ),
        pytest.param(
            "how-to/gitops.md",
            "../../examples/gitops",
            "tree/abc/examples/gitops",
            id="a folder of the repository",
        ),
        pytest.param("index.md", "prose.py", "blob/abc/docs/prose.py", id="a script beside pages"),
    ],
)
def test_link_becomes_a_link_of_the_site(page: str, target: str, expected: str | None) -> None:
    is_source = expected is not None and expected.split("/")[0] in ("blob", "tree")
    wanted = f"{SOURCE}/{expected}" if is_source else expected or target

    assert build_site.site_link(page, target, "abc") == wanted


def test_code_keeps_what_looks_like_a_link() -> None:
    text = "`[a](../a.py)` [b](../b.py)\n\n```\n[c](../c.py)\n```\n"

    assert build_site.site_text("page.md", text, "abc") == text.replace(
        "../b.py", f"{SOURCE}/blob/abc/b.py"
    )


def test_measurements_and_decisions_are_not_searched() -> None:
    excluded = [
        page
        for page in (
            "status.md",
            "benchmarks/README.md",
            "benchmarks/gpu.md",
            "decisions/0010-a.md",
        )
        if "exclude" in build_site.site_text(page, "# Title\n", "abc")
    ]

    assert excluded == ["benchmarks/gpu.md", "decisions/0010-a.md"]


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("runbook.md#lost-nodes", "runbook/#lost-nodes"),
        ("how-to/jobs.md", "how-to/jobs/"),
        ("benchmarks/README.md", "benchmarks/"),
        ("index.md", ""),
    ],
)
def test_page_has_the_address_of_the_site(page: str, expected: str) -> None:
    assert build_site.address(page) == expected


def test_moved_page_redirects_with_its_anchor() -> None:
    moved = {
        "how-to/old.md": "how-to/new.md",
        "how-to/old.md#rows": "data.md#formats",
        "other.md": "index.md",
    }

    html = build_site.redirects(moved)

    assert list(html) == ["how-to/old/", "other/"]
    assert '"../../how-to/new/" + location.hash' in html["how-to/old/"]
    assert '{"#rows": "../../data/#formats"}' in html["how-to/old/"]
    assert 'content="1; url=../"' in html["other/"]


def test_moved_pages_are_gone_and_their_new_pages_exist() -> None:
    docs = SCRIPT.parent
    old = {page.partition("#")[0] for page in build_site.MOVED}
    new = {page.partition("#")[0] for page in build_site.MOVED.values()}

    assert [page for page in old if (docs / page).exists()] == []
    assert [page for page in new if not (docs / page).exists()] == []
