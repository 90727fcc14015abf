"""The figures of ``benchmarks.update`` as tables, in Markdown, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median

from benchmarks.table import OUT
from benchmarks.update_figures import PHASES, Figures
from benchmarks.update_raw import Raw
from benchmarks.update_runs import LONG, Kind
from headway.cluster.hardware import available_cores, cpu_model

SEND_AIM, ROLLOUT_AIM, TRAINER_AIM, DELTA_AIM = 0.70, 0.01, 0.05, 0.15
SEND_AIM_BYTES = 40e6
"""From here on the aim for send holds: from 25 M parameters up."""
NONE = "—"


@dataclass(slots=True)
class Row:
    """One way to update one model."""

    size: str
    kind: Kind
    raws: list[Raw] = field(default_factory=list)
    figures: Figures = field(default_factory=Figures)
    failure: str | None = None

    @property
    def measured(self) -> bool:
        return self.figures.versions > 0

    def raw(self, value: Callable[[Raw], float]) -> float:
        """Median, of what was measured beside this row's runs."""
        return median(map(value, self.raws))

    @property
    def send_share(self) -> float | None:
        """Bytes per second of send ÷ of the raw broadcast; None where it is not the same bytes that are sent."""
        rate = self.figures.send_bytes_per_s
        if rate is None or self.kind.encoding == "delta":
            return None
        return rate / self.raw(lambda raw: raw.nbytes / raw.broadcast_s)


@dataclass(frozen=True, slots=True)
class Long:
    """Stalls where versions are longer."""

    size: str
    groups: int
    figures: Figures | None
    failure: str | None


@dataclass(frozen=True, slots=True)
class Deltas:
    """What changes at a small learning rate."""

    model: str
    figures: Figures | None
    failure: str | None


@dataclass(slots=True)
class Results:
    parameters: dict[str, int] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    long: list[Long] = field(default_factory=list)
    deltas: list[Deltas] = field(default_factory=list)


def write(results: Results, *, show: bool = False) -> str:
    """Into ``build/bench``; the tables where they are to be shown, else nothing."""
    OUT.mkdir(parents=True, exist_ok=True)
    text = markdown(results)
    (OUT / "update.md").write_text(text)
    (OUT / "update.json").write_text(json.dumps(asdict(results), indent=1))
    return f"{text}\nwritten to {OUT / 'update.md'} and {OUT / 'update.json'}" if show else ""


def markdown(results: Results) -> str:
    parts = [f"{available_cores()} cores of {cpu_model()}; weights are served in bfloat16; MB are 10⁶ bytes.\n"]
    for size, parameters in results.parameters.items():
        rows = [row for row in results.rows if row.size == size and row.raws]
        title = f"{size}: {parameters:,} parameters, {2 * parameters / 1e6:.1f} MB"
        parts += [f"### {title}\n", _phases(rows), _stalls(rows)] if rows else []
    sections = {
        "The machine itself": _machine(results.rows),
        "Prefilled again after `interrupt`": _prefilled_again(results.rows),
        f"Longer versions: {LONG.name}, keep": _long(results.long),
        "Deltas at a learning rate of 1e-6 (the first update, which is whole, left out)": _deltas(results.deltas),
        "Aims": _aims(results),
    }
    parts += [f"### {title}\n\n{table}" for title, table in sections.items() if table]
    failures = [f"- {row.size} {row.kind.name}: {row.failure}" for row in results.rows if row.failure]
    failures += [f"- {one.size}, longer versions: {one.failure}" for one in results.long if one.failure]
    failures += [f"- deltas, {one.model}: {one.failure}" for one in results.deltas if one.failure]
    parts += ["### Failed\n", *failures] if failures else []
    return "\n".join(parts)


def _phases(rows: Sequence[Row]) -> str:
    header = ["update", *(f"{phase} ms" for phase in PHASES), "sent MB", "changed", "send GB/s", "of raw broadcast"]

    def cells(row: Row) -> list[str]:
        figures = row.figures
        rate = figures.send_bytes_per_s
        return [
            *(_ms(figures.phase(phase)) for phase in PHASES),
            f"{fmean(figures.sent) / 1e6:.3g}",
            _percent(median(figures.changed) if figures.changed else None),
            NONE if rate is None else f"{rate / 1e9:.2f}",
            _percent(row.send_share),
        ]

    return _table(header, [[row.kind.name, *_or_failed(row, cells, len(header) - 1)] for row in rows])


def _stalls(rows: Sequence[Row]) -> str:
    header = [
        "update",
        "version s",
        "trainer stall ms",
        "share",
        "rollout stall ms",
        "share",
        "decode step during transfer",
        "train step",
    ]
    usual = [
        s for row in rows if row.kind.schedule == "synchronous" and not row.kind.variant for s in row.figures.steps
    ]

    def cells(row: Row) -> list[str]:
        figures = row.figures
        step = median(figures.steps) / median(usual) if figures.steps and usual else None
        return [
            f"{figures.version_s:.3g}",
            _ms(median(figures.trainer_stall)),
            _percent(figures.trainer_share),
            _ms(median(figures.rollout_stall)),
            _percent(figures.rollout_share),
            _times(figures.decode_slowdown),
            _times(step),
        ]

    return _table(header, [[row.kind.name, *_or_failed(row, cells, len(header) - 1)] for row in rows])


def _machine(rows: Sequence[Row]) -> str:
    header = ["model", "MB", "broadcast", "transport alone", "of raw broadcast", "memcpy"]
    lines = []
    for size in dict.fromkeys(row.size for row in rows if row.raws):
        raws = [raw for row in rows if row.size == size for raw in row.raws]
        nbytes = raws[0].nbytes
        seconds = [median(getattr(raw, name) for raw in raws) for name in ("broadcast_s", "transport_s", "memcpy_s")]
        shown = [f"{_ms(s)} ms, {nbytes / s / 1e9:.2f} GB/s" for s in seconds]
        lines.append([size, f"{nbytes / 1e6:.1f}", *shown[:2], _percent(seconds[0] / seconds[1]), shown[2]])
    return _table(header, lines)


def _prefilled_again(rows: Sequence[Row]) -> str:
    header = ["model", "update", "cut per update", "tokens prefilled again", "ms", "rollout stall ms"]
    pairs = [
        row
        for row in rows
        if row.measured and row.kind.transport == "broadcast" and row.kind.encoding == "full" and row.kind.verify
        if row.kind.dual_buffer
    ]
    lines = []
    for row in pairs:
        figures = row.figures
        tokens, seconds = zip(*figures.again, strict=True) if figures.again else ((), ())
        lines.append(
            [
                row.size,
                f"{row.kind.schedule} {row.kind.on_update}",
                f"{fmean(figures.interrupted):.2g}",
                f"{median(tokens):.3g}" if tokens else "0",
                _ms(median(seconds)) if seconds else "0",
                _ms(median(figures.rollout_stall)),
            ]
        )
    return _table(header, lines)


def _long(rows: Sequence[Long]) -> str:
    header = [
        "model",
        "groups per version",
        "version s",
        "gather ms",
        "trainer stall ms",
        "gather and stall, of gather",
        "rollout stall ms",
        "share",
    ]
    lines = [
        [
            row.size,
            str(row.groups),
            f"{row.figures.version_s:.3g}",
            _ms(row.figures.phase("gather")),
            _ms(median(row.figures.trainer_stall)),
            _times(_taken(row.figures)),
            _ms(median(row.figures.rollout_stall)),
            _percent(row.figures.rollout_share),
        ]
        for row in rows
        if row.figures is not None
    ]
    return _table(header, lines)


def _deltas(rows: Sequence[Deltas]) -> str:
    header = ["model", "updates", "changed", "largest", "sent of full", "largest"]
    lines = []
    for row in rows:
        if (figures := row.figures) is not None:
            sent = [nbytes / figures.full_nbytes for nbytes in figures.sent]
            changed = figures.changed
            shares = (median(changed), max(changed), figures.sent_share, max(sent))
            lines.append([row.model, str(len(sent)), *map(_percent, shares)])
    return _table(header, lines)


def _aims(results: Results) -> str:
    lines = []
    for row in results.rows:
        plain = row.kind.transport == "broadcast" and row.kind.encoding == "full" and not row.kind.variant
        if not (plain and row.measured) or row.raws[0].nbytes < SEND_AIM_BYTES:
            continue
        where, share = f"{row.size}, {row.kind.schedule}", row.send_share
        lines.append(_aim("send of `broadcast` ≥ 70% of the raw broadcast", where, share, hit=(share or 0) >= SEND_AIM))
        alone = row.raw(lambda raw: raw.broadcast_s / raw.transport_s)
        lines.append(_aim("the same without decoding and training beside it", where, alone, hit=alone >= SEND_AIM))
    for long in results.long:
        if (figures := long.figures) is not None:
            where = f"{long.size}, {figures.version_s:.3g} s a version"
            rollout, trainer, taken = figures.rollout_share, figures.trainer_share, _taken(figures) - 1
            lines.append(_aim("overlapped, keep: rollout stall ≤ 1%", where, rollout, hit=rollout <= ROLLOUT_AIM))
            lines.append(
                _aim("… trainer waits beyond gather ≤ 5% of its time", where, trainer, hit=trainer <= TRAINER_AIM)
            )
            lines.append(_aim("… the same ≤ 5% of gather", where, taken, hit=taken <= TRAINER_AIM))
    for delta in results.deltas:
        if (figures := delta.figures) is not None:
            share = figures.sent_share
            lines.append(_aim("delta ≤ 15% of the full bytes", delta.model, share, hit=share <= DELTA_AIM))
    return _table(["aim", "where", "measured", ""], lines)


def _aim(aim: str, where: str, measured: float | None, *, hit: bool) -> list[str]:
    return [aim, where, _percent(measured), "hit" if hit else "**miss**"]


def _taken(figures: Figures) -> float:
    """Time for which updates held the trainer ÷ their gathers'."""
    gather = sum(figures.phases["gather"])
    return (gather + sum(figures.trainer_stall)) / gather


def _or_failed(row: Row, cells: Callable[[Row], list[str]], count: int) -> list[str]:
    if row.measured:
        return cells(row)
    return ["failed" if row.failure else NONE, *[""] * (count - 1)]


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.1%}"


def _times(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}×"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, rule, *rows))
