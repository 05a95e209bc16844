"""Note which backend accepts which field, from the checks of the backends; `kind_pages` calls it.

The checks read a spec alone, so that a value without effect is refused before an attempt.
"""

from pydantic.alias_generators import to_camel

from finetune_operator.api.unbuilt import UNBUILT, Unbuilt
from finetune_operator.backends import profiles
from finetune_operator.backends.azureml import compute_checks
from finetune_operator.backends.local import machine_checks

_TABLES = {"local": machine_checks.NO_EFFECT, "azureml": compute_checks.NO_EFFECT}


def profile_notes() -> dict[str, str]:
    """Return a note on each field of a profile that a single backend uses, by its path."""
    used = {"kubernetes": profiles.USED_BY_KUBERNETES, "azureml": profiles.USED_BY_AZUREML}
    return {
        f"spec.{'.'.join(map(to_camel, field.split('.')))}": f"**Only backend `{backend}`.**"
        for backend, fields in used.items()
        for field in fields
    }


def job_notes() -> dict[str, str]:
    """Return a note on each field of a job that some backend refuses, by its path."""
    found = {f"spec.{entry.path}": _unsupported(entry) for entry in UNBUILT}
    by_path: dict[str, dict[str, Unbuilt]] = {}
    for backend, table in _TABLES.items():
        for entry in table:
            by_path.setdefault(f"spec.{entry.path}", {})[backend] = entry
    return found | {path: _refused(entries) for path, entries in by_path.items()}


def _unsupported(entry: Unbuilt) -> str:
    return f"Supported values: {_listed(entry)}." if entry.values else "Not supported yet."


def _refused(entries: dict[str, Unbuilt]) -> str:
    """Return the note on a field, given what each backend refuses."""
    is_of_kubernetes = len(entries) == len(_TABLES) and not any(
        one.values for one in entries.values()
    )
    sentences = ["**Only backend `kubernetes`.**"] if is_of_kubernetes else []
    for backend, entry in entries.items():
        advice = "" if entry.advice == "remove it" else f": {entry.advice}"
        if entry.values:
            sentences.append(f"**Backend `{backend}`: only {_listed(entry)}.**")
        elif not is_of_kubernetes:
            sentences.append(f"**Not with backend `{backend}`**{advice}.")
        elif advice:
            sentences.append(f"Backend `{backend}`{advice}.")
    return " ".join(sentences)


def _listed(entry: Unbuilt) -> str:
    return ", ".join(f"`{value}`" for value in entry.values)
