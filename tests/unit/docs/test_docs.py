"""Rules for all pages: navigation, links, manifests, commands and length."""

import re
import shlex
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from finetune_operator.api.crd import job_schema, profile_schema
from finetune_operator.api.paths import show_path
from finetune_operator.api.structural import check_structure
from finetune_operator.api.yaml_documents import YamlDocument, read_yaml
from finetune_operator.cli.app import app
from support.docs.pages import ROOT, Block, anchors, blocks, links, pages, read

PAGES = pages()
ON_SITE = [page for page in PAGES if page.startswith("docs/")]
MOST_WORDS = 1200
NO_LIMIT = re.compile(r"docs/(?:reference/|benchmarks/|decisions/|reliability\.md)")
"""Pages in which readers look things up, and generated pages."""
PLUGIN = "examples/plugin/README.md"
"""Example whose backend only tests/integration/testing/test_example_plugin.py installs."""
RUN_BY = {
    "README.md": "tests/integration/docs/test_readme.py",
    "CONTRIBUTING.md": "tests/integration/docs/test_readme.py",
    "docs/installation.md": "tests/e2e/test_01_installation.py",
    "docs/how-to/launchers.md": "tests/integration/docs/test_readme.py",
    "docs/tutorial.md": "tests/integration/docs/test_tutorial.py",
    "docs/how-to/choose-hardware.md": "tests/unit/cli/test_plan.py",
}
NOT_RUN = {
    "charts/finetune-operator/README.md": "placeholders; tests/e2e installs the chart by helm",
    "docs/how-to/azure-ml.md": "needs an Azure subscription",
    "docs/how-to/chat.md": "waits for questions; tests/integration/cli/test_chat.py asks them",
    "docs/how-to/checkpoints.md": "needs a pod that trains",
    "docs/how-to/data.md": "placeholder for a manifest; test_tutorial.py runs ftctl preview",
    "docs/how-to/first-hour-on-azure.md": "needs a subscription; test_first_hour.py has stand-ins",
    "docs/how-to/gitops.md": "needs Argo CD or Flux; tests/unit/charts checks the manifests",
    "docs/how-to/images.md": "needs docker and a registry; tests/images builds them by buildah",
    "docs/how-to/init.md": "needs the hub; tests/integration/test_first_day.py uses a folder",
    "docs/how-to/install-without-cluster-roles.md": "placeholders for people and registries",
    "docs/how-to/jobs.md": "needs nodes with GPUs",
    "docs/how-to/lost-nodes.md": "needs a node that may be deleted",
    "docs/how-to/migrate.md": "prints the problems of an invalid file",
    "docs/how-to/monitoring.md": "needs charts of other projects, or an Azure subscription",
    "docs/how-to/network-policies.md": "needs a cluster; test_doctor_cluster.py has one",
    "docs/how-to/profile.md": "needs a job that trains, or a GPU",
    "docs/how-to/trackers.md": "needs an account of the service",
    "docs/install.md": "test_tutorial.py runs ftctl doctor",
    "docs/security.md": "placeholders for people and namespaces",
    "docs/status.md": "needs a job in a cluster; tests/integration/docs/test_tutorial.py has one",
    "docs/troubleshooting.md": "needs a cluster; tests/integration/cli/test_doctor_cluster.py",
    "docs/upgrading.md": "needs two releases; tests/e2e upgrades the chart",
    PLUGIN: "placeholders; tests/integration/testing runs the plugin",
}
SHELLS = ("bash", "console", "sh")


def shells(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.language in SHELLS]


def commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Yield place and words of each `ftctl` or `make` command that starts a line of a block."""
    for number, line in enumerate(block.text.split("\n"), block.line):
        words = shlex.split(line.removeprefix("$ "), comments=True) if is_command(line) else []
        if words:
            yield f"{block.page}:{number}", words


def is_command(line: str) -> bool:
    return re.match(r"(\$ )?(ftctl|make) [^|]*$", line) is not None


COMMANDS = [one for page in PAGES for block in shells(page) for one in commands(block)]


def navigation() -> list[str]:
    """Return the pages below docs/ that the navigation of the site names."""
    config = tomllib.loads((ROOT / "docs/zensical.toml").read_text(encoding="utf-8"))
    return list(_pages_in(config["project"]["nav"]))


def _pages_in(part: object) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict | list):
        for one in part.values() if isinstance(part, dict) else part:
            yield from _pages_in(one)


def test_each_page_is_in_the_navigation_once() -> None:
    listed = Counter(f"docs/{page}" for page in navigation())
    pages = {page for page in ON_SITE if not page.startswith("docs/decisions/")}
    pages.add("docs/decisions/*.md")

    assert pages - set(listed) == set(), "add a line to nav in docs/zensical.toml"
    assert set(listed) - pages == set(), "remove the line from nav in docs/zensical.toml"
    assert [page for page, times in listed.items() if times > 1] == []


def broken(page: str) -> Iterator[str]:
    """Yield place and target of each link that leads to no file, or to no heading of a page."""
    for line, target in links(page):
        path, _, anchor = target.partition("#")
        aim = (ROOT / page).parent.joinpath(path).resolve() if path else ROOT / page
        is_page = aim.suffix == ".md" and aim.exists()
        if not aim.exists():
            yield f"{page}:{line}: {target} does not exist"
        elif is_page and anchor and anchor not in anchors(aim.relative_to(ROOT).as_posix()):
            yield f"{page}:{line}: {target} names no heading of the page"


def test_each_link_leads_to_a_file_and_to_a_heading() -> None:
    found = [one for page in PAGES for one in broken(page)]

    assert not found, "\n".join(found)


MANIFESTS = [
    block
    for page in PAGES
    if page != PLUGIN
    for block in blocks(page)
    if block.language == "yaml" and re.search(r"^(kind: FineTune|spec:)", block.text, re.MULTILINE)
    if not re.search(r"^kind: (?!FineTune)", block.text, re.MULTILINE)
]
WHOLE = [block for block in MANIFESTS if "apiVersion:" in block.text]
EXCERPTS = [block for block in MANIFESTS if block not in WHOLE]


@pytest.mark.parametrize("block", WHOLE, ids=lambda block: block.place)
def test_each_manifest_is_valid(block: Block, tmp_path: Path) -> None:
    # Empty lines before the manifest let a problem name the line of the page.
    file = tmp_path / Path(block.page).name
    file.write_text("\n" * (block.line - 1) + block.text)

    done = CliRunner().invoke(app, ["validate", str(file)])

    assert done.exit_code == 0, done.output.replace(str(file), block.page)


@pytest.mark.parametrize("block", EXCERPTS, ids=lambda block: block.place)
def test_each_excerpt_of_a_manifest_has_fields_of_a_kind(block: Block) -> None:
    [document] = read_yaml(block.text, block.page)
    assert isinstance(document, YamlDocument)
    excerpt = document.value
    kinds = {"FineTuneJob": job_schema(), "FineTuneProfile": profile_schema()}
    possible = [excerpt["kind"]] if "kind" in excerpt else list(kinds)
    wrong = [
        [one for one in check_structure(excerpt, kinds[kind]) if "is missing" not in one.message]
        for kind in possible
    ]

    listed = [f"{block.place}: {show_path(one.path)} {one.message}" for one in min(wrong, key=len)]
    assert not listed, "\n".join(listed)


def test_each_command_block_is_run_or_has_a_reason() -> None:
    shown = {page: block.place for page in PAGES for block in shells(page)}
    new = [place for page, place in shown.items() if page not in {**RUN_BY, **NOT_RUN}]

    assert not new, f"name a test that runs the commands, or a reason, for {new}"
    assert [page for page in {**RUN_BY, **NOT_RUN} if page not in shown] == []
    for page, test in RUN_BY.items():
        assert Path(page).name in read(test)


@pytest.mark.parametrize(("place", "words"), COMMANDS, ids=str)
def test_ftctl_and_make_accept_the_words_of_each_shown_command(
    place: str, words: list[str]
) -> None:
    program, *arguments = words
    if program == "make":
        done = subprocess.run(
            ["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{place}: {done.stderr}"
        return
    if "<" in arguments:
        arguments = arguments[: arguments.index("<")]
    root = get_command(app)
    assert isinstance(root, TyperGroup)
    _, command, rest = root.resolve_command(root.make_context("ftctl", [*arguments]), arguments)
    assert command is not None
    command.make_context(command.name, rest)  # raises for an option that does not exist


def too_long(page: str) -> str | None:
    """Return page and line at which the words exceed the limit, or None."""
    words = 0
    for number, line in enumerate(read(page).split("\n"), 1):
        words += len(line.split())
        if words > MOST_WORDS:
            return f"{page}:{number}"
    return None


def test_page_fits_into_the_limit_of_words() -> None:
    limited = [page for page in ON_SITE if not NO_LIMIT.match(page)]
    long = [place for page in limited if (place := too_long(page))]

    assert not long, f"more than {MOST_WORDS} words, from these lines on: {', '.join(long)}"
