"""Write the pages and schemas of this folder that come from the code.

`make generate` runs it; `python docs/reference/generate.py --check` only names each file that is
out of date. Each page has a module in this folder, which states its source.
"""

import json
import sys
from pathlib import Path

import api_status_page
import api_surface
import chat_templates
import command_page
import kind_pages
import metric_page
import model_page
from finetune_operator.api.crd import job_schema, profile_schema
from finetune_operator.api.json_schema import json_schemas

FOLDER = Path(__file__).parent


def main() -> int:
    """Write the files, or with `--check` name each stale file; return the exit code."""
    is_check = "--check" in sys.argv[1:]
    stale = {name: text for name, text in files().items() if _read(FOLDER / name) != text}
    for name, text in stale.items():
        if is_check:
            print(f"docs/reference/{name} is out of date; run: make generate")
        else:
            (FOLDER / name).parent.mkdir(exist_ok=True)
            (FOLDER / name).write_text(text, encoding="utf-8")
            print(f"wrote docs/reference/{name}")
    return int(is_check and bool(stale))


def files() -> dict[str, str]:
    """Return the text of each generated file by its name in this folder."""
    schemas = {
        f"schemas/{name}": json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
        for name, schema in json_schemas().items()
    }
    return {
        "finetunejob.md": kind_pages.job_page(job_schema()),
        "finetuneprofile.md": kind_pages.profile_page(profile_schema()),
        "api-status.md": api_status_page.page(api_surface.surface(), *api_surface.released()),
        "ftctl.md": command_page.page(),
        "models.md": model_page.page(),
        "metrics.md": metric_page.page(),
        "chat-templates.md": chat_templates.page(),
        **schemas,
    }


def _read(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.exists() else None


if __name__ == "__main__":
    sys.exit(main())
