"""The page of what was measured on GPUs, one table a card, from gpu.json.

python tests/benchmarks/gpu_page.py        # writes docs/benchmarks/gpu.md anew
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_bench.rows import FLOPS_PER_PARAMETER, ROWS, Aim, Row, aims_of
from measured import FOLDER

NOT_MEASURED = "not measured"
Rounds = Sequence[Mapping[str, Any]]

_HEAD = (
    "# The trainer on a GPU",
    "",
    "Written by `make bench-gpu`, after each row. Every row is a process of its own that goes the "
    "trainer's own way, with the defaults of a manifest and random weights; figures are medians "
    "of the rounds, which go over all rows in turn. Times are those of CUDA events at the ends of "
    "the steps after the first five; peaks are the allocator's, beside those that the start's "
    "check computes.",
    "",
    "MFU = F N tokens/s / 989e12, with N all parameters and F "
    f"{FLOPS_PER_PARAMETER['lora']} for LoRA, {FLOPS_PER_PARAMETER['full']} for full fine-tuning; "
    "attention is not counted. Beside it, the same FLOP/s by those of the product in the first "
    "row, which the card reached in the same run.",
)
_TINY = (
    "# The rows of the GPU benchmark with tiny models",
    "",
    "They run: no figure here says anything of a GPU.",
)
_COLUMNS = (
    "| row | figure | MFU | of the product | peak (formula), GiB | beside | asked | | what |",
    "|---|---:|---:|---:|---:|---:|---|---|---|",
)


def page(measured: Mapping[str, Any]) -> str:
    """Return the page; rows without figures say so."""
    lines = [*(_TINY if measured["is_tiny"] else _HEAD)]
    for card in measured["cards"].values():
        lines += ["", f"## {card['name']}", "", _machine(card), "", *_COLUMNS]
        lines += [_line(row, card, is_judged=not measured["is_tiny"]) for row in ROWS]
        lines += _said(card)
    if not measured["cards"]:
        lines += ["", f"No GPU was at hand yet: {NOT_MEASURED}.", "", *_COLUMNS]
        lines += [_unmeasured(row, row.aims, "") for row in ROWS]
    return "\n".join(lines) + "\n"


def _machine(card: Mapping[str, Any]) -> str:
    memory = f", {card['memory_gib']:.1f} GiB" if card["memory_gib"] else ""
    made = sorted({one["made_with"] for rounds in card["rows"].values() for one in rounds})
    flash = ", ".join(card["flash_3_and_4"]) or "neither FlashAttention 3 nor 4"
    notes = "".join(f" {note}." for note in card["notes"])
    return (
        f"{card['name']}{memory}; {card['cpu']}, {card['cores']} cores; Python {card['python']}; "
        f"{flash}.{notes} Made with: {' / '.join(made)}."
    )


def _line(row: Row, card: Mapping[str, Any], *, is_judged: bool) -> str:
    aims = aims_of(row, has_flash_3=bool(card["flash_3_and_4"])) if is_judged else ()
    rounds = card["rows"].get(row.name, [])
    measured = [one for one in rounds if "said" not in one]
    if not measured:
        is_full = any(one.get("is_out_of_memory") for one in rounds)
        return _unmeasured(row, aims, card["name"], "out of memory" if is_full else NOT_MEASURED)
    names = ("mfu", "peak_gib", "formula_gib", *_FIGURES)
    figures = {name: _median(measured, name) for name in names}
    product = _median(card["rows"].get("gemm", []), "flops_per_second")
    speed = _median(measured, "flops_per_second")
    share = speed / product if speed and product and row.kind != "gemm" else None
    figures["beside"] = _beside(row, measured, card["rows"], "tokens_per_second")
    figures["peak_beside"] = _beside(row, measured, card["rows"], "peak_gib")
    cells = [
        _figure(figures),
        _number(figures["mfu"], ".1%"),
        _number(share, ".1%"),
        f"{_number(figures['peak_gib'], '.1f')} {_in_brackets(figures['formula_gib'])}".strip(),
        "" if figures["beside"] is None else f"{figures['beside']:.3f} x `{row.beside}`",
        *_asked(aims, card["name"], figures),
        row.says + _system(measured),
    ]
    return f"| `{row.name}` | {' | '.join(cells)} |"


_FIGURES = {
    "tokens_per_second": "{:.0f} tokens/s",
    "idle_share": "{:.1%} idle",
    "blocking_ratio": "{:.3f}",
    "flops_per_second": "{:.3g} FLOP/s",
}
"""What a row is about, the first that it has; the profiler slows steps down."""


def _figure(figures: Mapping[str, float | None]) -> str:
    order = ("idle_share", *_FIGURES)
    name = next(name for name in order if figures[name] is not None)
    return _FIGURES[name].format(figures[name])


def _asked(aims: Sequence[Aim], card: str, figures: Mapping[str, float | None]) -> tuple[str, str]:
    """Return the bounds, and whether each is kept."""
    verdicts = []
    for aim in aims:
        found = figures.get(aim.figure)
        if aim.of(card) is not None and found is not None:
            verdicts.append("met" if aim.is_met(card, found) else "**missed**")
    return _bounds(aims, card), ", ".join(verdicts)


def _bounds(aims: Sequence[Aim], card: str) -> str:
    return ", ".join(filter(None, (_bound(aim, card) for aim in aims)))


def _bound(aim: Aim, card: str) -> str:
    sign = "≤" if aim.is_most else "≥"
    if card:
        bound = aim.of(card)
        return "" if bound is None else f"`{aim.figure}` {sign} {_plain(bound)}"
    cards = (f"{_plain(bound)} {word}".strip() for word, bound in aim.bound.items())
    return f"`{aim.figure}` {sign} {', '.join(cards)}"


def _plain(bound: float) -> str:
    return f"{bound:,.0f}" if bound >= 1000 else f"{bound:.4g}"


def _unmeasured(row: Row, aims: Sequence[Aim], card: str, word: str = NOT_MEASURED) -> str:
    bounds = _bounds(aims, card)
    return f"| `{row.name}` | {word} | | | | | {bounds} | | {row.says} |"


def _beside(row: Row, measured: Rounds, rows: Mapping[str, Rounds], figure: str) -> float | None:
    """Return the median over the rounds of a figure by that of the row beside."""
    others = rows.get(row.beside, []) if row.beside else []
    ratios = [
        one[figure] / other[figure]
        for one, other in zip(measured, others, strict=False)
        if figure in one and figure in other and one["made_with"] == other["made_with"]
    ]
    return statistics.median(ratios) if ratios else None


def _median(rounds: Rounds, name: str) -> float | None:
    values = [one[name] for one in rounds if name in one]
    return statistics.median(values) if values else None


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _in_brackets(value: float | None) -> str:
    return "" if value is None else f"({value:.1f})"


def _system(measured: Rounds) -> str:
    systems = sorted({one["system"] for one in measured if "system" in one})
    return f": {', '.join(systems)}" if systems else ""


def _said(card: Mapping[str, Any]) -> list[str]:
    """Return why rows have no figures."""
    said = [
        f"- `{name}`: {text}"
        for name, rounds in card["rows"].items()
        for text in sorted({one["said"] for one in rounds if "said" in one})
    ]
    return ["", *said] if said else []


def main() -> None:
    """Write the page anew from gpu.json."""
    path = FOLDER / "gpu.json"
    measured = json.loads(path.read_text()) if path.exists() else {"is_tiny": False, "cards": {}}
    (FOLDER / "gpu.md").write_text(page(measured))


if __name__ == "__main__":
    main()
