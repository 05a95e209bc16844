"""Build the documentation site into build/site: `make docs` runs this script.

    python docs/build_site.py [FOLDER]    # FOLDER instead of build

Zensical builds copies of the pages, and refuses links without a target. In the copies, links to
files that are not pages become links to the source on GitHub at the commit that is built.
"""

import json
import posixpath
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

DOCS = Path(__file__).parent
SOURCE = "https://github.com/finetune-operator/finetune-operator"
CONFIG = (DOCS / "zensical.toml").read_text("utf-8")
MOVED: dict[str, str] = tomllib.loads(CONFIG)["project"]["extra"]["moved"]
NOT_SEARCHED = re.compile(r"decisions/|benchmarks/(?!README)")
# Code comes first in the pattern, so that no link is found inside code.
_LINK = re.compile(r"^ *(`{3,})[^`].*?^ *\1$|`+[^`]+`+|(\]\()([^()\s]+)(?=\))", re.M | re.S)
_REDIRECT = """<!doctype html>
<meta charset="utf-8">
<title>Moved</title>
<meta http-equiv="refresh" content="1; url=%(page)s">
<script>
const anchors = %(anchors)s;
location.replace(anchors[location.hash] ?? "%(page)s" + location.hash);
</script>
<p>This page has moved to <a href="%(page)s">another address</a>.</p>
"""


def site_link(page: str, target: str, commit: str) -> str:
    """Return the target on the site of a link in a page, whose path is relative to docs/."""
    path, _, anchor = target.partition("#")
    if not path or ":" in path:
        return target
    inside = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
    if inside == "decisions":
        return posixpath.join(path, "index.md")
    if inside.endswith((".md", ".svg")) and not inside.startswith(".."):
        return target
    from_root = posixpath.normpath(posixpath.join("docs", inside))
    kind = "tree" if (DOCS.parent / from_root).is_dir() else "blob"
    return f"{SOURCE}/{kind}/{commit}/{from_root}" + (f"#{anchor}" if anchor else "")


def site_text(page: str, text: str, commit: str) -> str:
    """Return the text of a page with the links of the site."""

    def with_site_link(found: re.Match[str]) -> str:
        return f"{found[2]}{site_link(page, found[3], commit)}" if found[2] else found[0]

    head = "---\nsearch: {exclude: true}\n---\n\n" if NOT_SEARCHED.match(page) else ""
    return head + _LINK.sub(with_site_link, text)


def address(page: str) -> str:
    """Return the address of a page of docs/, relative to the root of the site."""
    path, _, anchor = page.partition("#")
    folder = re.sub(r"((^|/)(index|README))?\.md$", "/", path).lstrip("/")
    return folder + (f"#{anchor}" if anchor else "")


def redirects(moved: dict[str, str]) -> dict[str, str]:
    """Return the HTML at each old address, from the table of moved pages."""
    pages = {}
    for old in (old for old in moved if "#" not in old):
        up = "../" * address(old).count("/")
        ones = {one: new for one, new in moved.items() if one.startswith(f"{old}#")}
        anchors = {one.removeprefix(old): up + address(new) for one, new in ones.items()}
        values = {"page": up + address(moved[old]), "anchors": json.dumps(anchors)}
        pages[address(old)] = _REDIRECT % values
    return pages


def write_copies(build: Path, commit: str) -> None:
    """Write pages, pictures and configuration into the build folder."""
    ignored = shutil.ignore_patterns("*.py", "*.toml", "*.json", "__pycache__")
    shutil.copytree(DOCS, build / "docs", ignore=ignored)
    decisions = sorted((DOCS / "decisions").glob("*.md"))
    titles = [page.read_text("utf-8").split("\n")[0].strip("# ") for page in decisions]
    listed = [f"- [{title}]({page.name})" for title, page in zip(titles, decisions, strict=True)]
    text = "\n".join(["# Decisions", "", "Reasons for choices in the code.", "", *listed, ""])
    (build / "docs/decisions/index.md").write_text(text, "utf-8")
    for copy in (build / "docs").rglob("*.md"):
        page = copy.relative_to(build / "docs").as_posix()
        copy.write_text(site_text(page, copy.read_text("utf-8"), commit), "utf-8")
    names = ", ".join(f'"decisions/{name}"' for name in ("index.md", *(p.name for p in decisions)))
    config = CONFIG.replace('"decisions/*.md"', names)
    (build / "zensical.toml").write_text(config, "utf-8")


def main() -> int:
    """Build the site; return the exit code."""
    build = Path(sys.argv[1] if len(sys.argv) > 1 else DOCS.parent / "build")
    shutil.rmtree(build / "docs", ignore_errors=True)
    shutil.rmtree(build / "site", ignore_errors=True)
    revision = ["git", "-C", str(DOCS), "rev-parse", "HEAD"]
    commit = subprocess.run(revision, check=True, capture_output=True, text=True).stdout.strip()
    write_copies(build, commit)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file"]
    done = subprocess.run([*command, build / "zensical.toml"], stderr=subprocess.PIPE, text=True)
    report = re.sub(r"\x1b\[[\d;]*m", "", done.stderr)
    is_listed = "Aborted because --strict flag is set" in report
    print(report.partition("Traceback")[0] if is_listed else report, file=sys.stderr)
    for folder, html in redirects(MOVED).items():
        (build / "site" / folder).mkdir(parents=True)
        (build / "site" / folder / "index.html").write_text(html, "utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
