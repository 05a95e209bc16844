"""The tables of `ftctl top`."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from finetune_operator.cli.top_rows import JobRow, RankRow, Screen, SuspectRow
from finetune_operator.cli.view import duration

_UNKNOWN = "-"
_GIB = 2**30
_JOBS = (
    *("job", "phase", "reason", "step", "loss", "tokens/s", "left"),
    *("restarts", "age", "held back by"),
)
_RANKS = ("rank", "node", "phase", "step", "step time", "waits", "score", "memory", "gpu", "seen")
_LEFT_ALIGNED = {"job", "phase", "reason", "held back by", "node"}


def tables(screen: Screen) -> RenderableType:
    """Return the content of a screen as tables."""
    times = Counter(one.key for one in screen.jobs)
    jobs = [_job(one, is_unique=times[one.key] == 1) for one in screen.jobs]
    parts: list[RenderableType] = [_table(_JOBS, jobs)]
    if screen.ranks is not None:
        parts += ["", _table(_RANKS, [_rank(one) for one in screen.ranks])]
    parts += [Text(f"! {one}", style="yellow") for one in screen.notes]
    return Group(*parts)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(
            name.upper(),
            justify="left" if name in _LEFT_ALIGNED else "right",
            no_wrap=name != "held back by",
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _job(row: JobRow, *, is_unique: bool) -> list[str]:
    """Return the cells of a job; its folder distinguishes it from runs that were moved aside."""
    total = f"/{row.total_steps}" if row.total_steps else ""
    folder = "" if is_unique or row.run_directory is None else f" in {row.run_directory}"
    return [
        f"{row.key}{folder}",
        row.phase,
        row.reason or _UNKNOWN,
        _UNKNOWN if row.step is None else f"{row.step}{total}",
        _number(row.loss, "{:.3f}"),
        _number(row.tokens_per_second, "{:,.0f}"),
        _UNKNOWN if row.eta_seconds is None else duration(row.eta_seconds),
        str(row.restarts),
        _UNKNOWN if row.age_seconds is None else duration(row.age_seconds),
        ", ".join(map(_suspect, row.suspects)) or _UNKNOWN,
    ]


def _rank(row: RankRow) -> list[str]:
    score = _number(row.score, "{:.2f}")
    return [
        str(row.rank),
        row.node or _UNKNOWN,
        row.phase or _UNKNOWN,
        _UNKNOWN if row.step is None else str(row.step),
        _step_time(row.step_seconds),
        _percent(row.waiting_ratio),
        f"{score} {row.cause}" if row.cause else score,
        _memory(row.memory_bytes),
        _percent(row.gpu_utilization_ratio),
        _UNKNOWN if row.age_seconds is None else f"{duration(row.age_seconds)} ago",
    ]


def _suspect(one: SuspectRow) -> str:
    score = f" {one.score:.2f}" if one.score is not None else ""
    return f"rank {one.rank} ({one.cause}{score})"


def _number(value: float | None, form: str) -> str:
    return _UNKNOWN if value is None else form.format(value)


def _percent(ratio: float | None) -> str:
    return _UNKNOWN if ratio is None else f"{100 * ratio:.0f} %"


def _step_time(seconds: float | None) -> str:
    if seconds is None:
        return _UNKNOWN
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _memory(by_kind: Mapping[str, float]) -> str:
    """Return the allocated memory of the GPU, or the memory of the process without a GPU."""
    known = by_kind.get("allocated", by_kind.get("host_rss"))
    return _UNKNOWN if known is None else f"{known / _GIB:.2f} GiB"
