"""The documentation site as `make docs` builds it: strict, without other hosts, and searchable."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "docs" / "build_site.py"
SEARCH = ROOT / "tests" / "support" / "docs" / "site_search.cjs"
RULES = ROOT / "charts" / "finetune-operator" / "files" / "rules.yaml"
build_site = SimpleNamespace(**runpy.run_path(str(SCRIPT)))

STRUCTURE = ("h1", "h2", "h3", "h4", "img", "li", "ol", "pre", "strong", "table", "td", "ul")
LOADED = {"src", "srcset", "poster", "data"}
LOADED_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "preconnect"}
# The script of the theme loads code or figures from other hosts for elements of these classes.
LOADS_MORE = re.compile(r'class="(?:mermaid|md-source|glightbox)\b')
FOREIGN_STYLE = re.compile(r"(?:url\(|@import\s*)[\"']?(?:https?:)?//")

RESEARCHER = {
    "first run": "tutorial.md",
    "own data": "how-to/init.md",
    "jsonl": "how-to/data.md",
    "chat template": "how-to/data.md reference/chat-templates.md",
    "packing": "how-to/data.md",
    "alpaca": "how-to/data.md",
    "axolotl": "how-to/migrate.md",
    "LoRA rank": "how-to/choose.md",
    "QLoRA": "how-to/choose.md",
    "learning rate": "reference/finetunejob.md",
    "batch size": "how-to/choose.md",
    "gradient accumulation": "how-to/choose.md",
    "FSDP": "how-to/choose.md",
    "supported models": "how-to/choose.md reference/models.md reference/chat-templates.md",
    "resume": "how-to/checkpoints.md",
    "one more epoch": "how-to/checkpoints.md",
    "exit code": "how-to/checkpoints.md",
    "OOM": "troubleshooting.md",
    "out of memory": "troubleshooting.md",
    "eval loss": "how-to/export.md how-to/data.md",
    "early stopping": "how-to/export.md",
    "merge adapter": "how-to/export.md",
    "vLLM": "how-to/export.md",
    "chat with model": "how-to/chat.md",
    "wandb": "how-to/trackers.md",
    "mlflow": "how-to/trackers.md",
    "torchrun": "how-to/launchers.md",
    "slow steps": "how-to/profile.md",
    "memory snapshot": "how-to/profile.md",
    "watch ranks": "how-to/top.md",
}
PLATFORM_ENGINEER = {
    "install": "install.md installation.md",
    "helm values": "installation.md reference/values.md",
    "network policy": "how-to/network-policies.md",
    "upgrade": "upgrading.md",
    "rollback": "upgrading.md",
    "uninstall": "upgrading.md",
    "operator does not start": "how-to/operator-start.md",
    "spot": "how-to/gpus.md",
    "autoscaling": "how-to/gpus.md",
    "Kueue queue": "how-to/gpus.md",
    "InfiniBand": "how-to/gpus.md",
    "node lost": "how-to/lost-nodes.md",
    "slow rank": "reference/reasons.md",
    "FineTuneRankStuck": "runbook.md",
    "XID": "runbook.md",
    "alerts": "runbook.md how-to/monitoring.md",
    "prometheus": "how-to/monitoring.md",
    "grafana dashboard": "how-to/monitoring.md",
    "dcgm": "how-to/monitoring.md",
    "metric names": "reference/metrics.md",
    "argo cd": "how-to/gitops.md",
    "flux": "how-to/gitops.md",
    "kustomize": "how-to/gitops.md",
    "azure ml workspace": "how-to/azure-ml.md",
    "workload identity": "how-to/azure-ml.md",
    "build images": "how-to/images.md",
    "RBAC": "security.md",
    "credentials": "security.md",
    "pvc": "how-to/jobs.md",
    "service account": "reference/permissions.md",
    "conditions": "status.md",
    "phase Unknown": "status.md",
    "Unschedulable": "how-to/gpus.md reference/reasons.md",
    "write a backend": "backends.md",
    "SBOM": "how-to/images.md",
}
QUESTIONS = {**RESEARCHER, **PLATFORM_ENGINEER}
"""Questions in the words of users, and the pages that may be the first hit."""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a strict build."""
    folder = tmp_path_factory.mktemp("build")
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stderr
    return folder


@pytest.fixture(scope="module")
def site(build: Path) -> Path:
    return build / "site"


def html_of(site: Path, page: str) -> str:
    return (site / build_site.address(page) / "index.html").read_text(encoding="utf-8")


def article(html: str) -> str:
    found = re.search(r"<article[^>]*>(.*)</article>", html, re.DOTALL)
    assert found is not None
    return found[1]


class Elements(HTMLParser):
    """Collects tag and attributes of each element."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))


def structure(html: str) -> Counter[str]:
    return Counter(tag for tag, _ in Elements(html).found if tag in STRUCTURE)


@pytest.mark.full
def test_each_page_has_the_structure_that_github_shows(build: Path, site: Path) -> None:
    """Python-Markdown and GitHub read indented lists and tables differently."""
    github = MarkdownIt("commonmark").enable("table")
    for file in (build / "docs").rglob("*.md"):
        page = file.relative_to(build / "docs").as_posix()
        text = re.sub(r"\A---\n.*?\n---\n", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)

        assert structure(article(html_of(site, page))) == structure(github.render(text)), page


def foreign(html: str) -> Iterator[str]:
    """Yield each address of another host from which a page loads something."""
    for tag, attributes in Elements(html).found:
        names = {name for name in attributes if name in LOADED}
        if tag == "link" and LOADED_LINKS & set(attributes.get("rel", "").split()):
            names.add("href")
        yield from (attributes[name] for name in names if "//" in attributes[name])
    yield from (found[0] for found in FOREIGN_STYLE.finditer(html))
    yield from (found[0] for found in LOADS_MORE.finditer(html))


def test_site_loads_no_file_from_another_host(site: Path) -> None:
    found = {
        str(file.relative_to(site)): addresses
        for file in site.rglob("*.html")
        if (addresses := list(foreign(file.read_text(encoding="utf-8"))))
    }
    styles = [css for css in site.rglob("*.css") if FOREIGN_STYLE.search(css.read_text("utf-8"))]

    assert found == {}
    assert styles == []


def test_links_to_the_source_name_files_of_the_built_commit(site: Path) -> None:
    revision = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(revision, check=True, capture_output=True, text=True).stdout.strip()
    link = re.compile(rf'href="{build_site.SOURCE}/(?:blob|tree)/([^/"]+)/([^"#]+)')
    found = {
        target for file in site.rglob("*.html") for target in link.findall(file.read_text("utf-8"))
    }

    assert {name for name, _ in found} - {"main"} == {commit}
    assert [path for _, path in found if not (ROOT / path).exists()] == []


def test_each_alert_links_to_a_section_of_the_site(site: Path) -> None:
    groups = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    links = [alert["annotations"]["runbook_url"] for alert in alerts]
    targets = [re.fullmatch(r".*/blob/main/docs/(.+\.md)#(.+)", link) for link in links]

    assert len(targets) >= 21
    for target in targets:
        assert target is not None
        assert f'id="{target[2]}"' in html_of(site, target[1])


def test_old_address_leads_to_a_page_and_an_anchor_of_the_site(site: Path) -> None:
    for old, new in build_site.MOVED.items():
        page, _, anchor = new.partition("#")
        assert build_site.address(page) in html_of(site, old.partition("#")[0])
        assert not anchor or f'id="{anchor}"' in html_of(site, page)


@pytest.fixture(scope="module")
def first_hits(site: Path) -> dict[str, str]:
    """The page of the first hit of each question, by the code that searches in a browser."""
    if (node := shutil.which("node")) is None:
        pytest.skip("node is not in PATH, which runs the search of the site")
    [worker] = site.glob("assets/javascripts/workers/search.*.js")
    done = subprocess.run(
        [node, SEARCH, worker, site / "search.json"],
        input=json.dumps(list(QUESTIONS)),
        check=True,
        capture_output=True,
        text=True,
    )
    hits = zip(QUESTIONS, json.loads(done.stdout), strict=True)
    return {question: found[0].partition("#")[0] if found else "" for question, found in hits}


@pytest.mark.parametrize("question", QUESTIONS)
def test_right_page_is_the_first_hit(question: str, first_hits: dict[str, str]) -> None:
    assert first_hits[question] in map(build_site.address, QUESTIONS[question].split())
