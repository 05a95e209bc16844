"""Parse quantities of Kubernetes, such as 500m or 16Gi. Pure."""

import re
from decimal import Decimal

_FORM = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(m|k|[KMGTPE]i?|)")
_THOUSANDS = {"m": -1, "": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


def amount(text: str | int) -> Decimal:
    """Return the amount: cores, bytes or pieces.

    Raises:
        ValueError: The text is not a quantity, or has an unusual form such as 1e3.
    """
    found = _FORM.fullmatch(str(text))
    if found is None or found[2] == "K":
        raise ValueError(f"{text} is not a valid amount; write for example 8, 500m or 16Gi")
    base = 1024 if found[2].endswith("i") else 1000
    return Decimal(found[1]) * Decimal(base) ** _THOUSANDS[found[2][:1]]
