"""Write `models.md` from the families in tests/corpus/model_families.yaml; `generate` calls it.

A test trains a small model of each family and compares the result with that file.
"""

from pathlib import Path

import yaml

FAMILIES = Path(__file__).parents[2] / "tests/corpus/model_families.yaml"
_HEAD = """\
# Supported models

Generated from `tests/corpus/model_families.yaml`; `make generate` writes it.

A job trains a causal language model of transformers, from the hub, a volume or a folder. Its family
is `model_type` in its `config.json`. The {total} causal families of transformers {version} are
below. A test trains a small random model of each family that is not refused, and compares loss and
gradient with the model itself, one document at a time. Chat templates are on
[another page](chat-templates.md).

## Packed

Several rows share a sequence, and no row reads another (`training.packing`):

{packed}.

## One row per sequence

The documents of a pack would affect each other. Without `training.packing`, each row is a sequence
of its own, and the log contains a warning. `packing: true` is refused.

| Reason, as in the message | Families |
|---|---|
{padded}

## Refused

The trainer refuses these families before it loads weights.

| Reason, as in the message | Families |
|---|---|
{refused}

An encoder whose `config.json` has `is_decoder: true` is trained.

## Compared with a plain loop

`make parity-families` trains these families from a manifest and in a plain PyTorch loop, packed and
not, whole and with LoRA, and compares losses and weights: {compared}.
"""


def page() -> str:
    """Return the reference as Markdown."""
    families = yaml.safe_load(FAMILIES.read_text(encoding="utf-8"))
    groups = {
        key: "\n".join(
            f"| {reason} | {_listed(names)} |" for reason, names in families[key].items()
        )
        for key in ("padded", "refused")
    }
    reasons = (*families["padded"].values(), *families["refused"].values())
    return _HEAD.format(
        total=len(families["packed"]) + sum(len(names) for names in reasons),
        version=families["transformers"],
        packed=_listed(families["packed"]),
        compared=_listed(families["compared"]),
        **groups,
    )


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
