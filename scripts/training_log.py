"""The JSON lines that `fairseq-train --log-format json` writes, read back as curves.

fairseq adds one more handler to its log file at every epoch and validation, so lines come several times
there, and a resumed run repeats updates; the last line of an update counts.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

Stats = dict[str, float]


@dataclass
class TrainingLog:
    """Statistics by update number: `train` holds the averages since the line before, `valid` validation.

    Losses are in base 2 per target token. Keys are fairseq's: `loss`, `nll_loss`, `lr`, `gnorm`, `wps`, `wall`
    and, for validation, the same without the prefix `valid_`.
    """

    train: dict[int, Stats] = field(default_factory=dict)
    valid: dict[int, Stats] = field(default_factory=dict)

    def add(self, line: str) -> None:
        """Take in one line of a log; lines that are not statistics are passed over."""
        stats = parse_line(line)
        if stats is None:
            return
        if "valid_loss" in stats:
            stats = {key.removeprefix("valid_"): value for key, value in stats.items()}
            self.valid[int(stats["num_updates"])] = stats
        elif "loss" in stats:
            self.train[int(stats["num_updates"])] = stats

    def curve(self, split: str, key: str) -> tuple[list[int], list[float]]:
        """Update numbers and values of one statistic, `split` being `train` or `valid`."""
        points = {update: stats[key] for update, stats in getattr(self, split).items() if key in stats}
        return sorted(points), [points[update] for update in sorted(points)]

    def losses(self, split: str) -> tuple[list[int], list[float]]:
        """Update numbers and losses without label smoothing, where fairseq reports them apart."""
        updates, values = self.curve(split, "nll_loss")
        return (updates, values) if updates else self.curve(split, "loss")


def parse_line(line: str) -> Stats | None:
    """The numbers in one JSON line, with or without fairseq's time stamp before it, or None."""
    start = line.find('{"')
    if start < 0:
        return None
    try:
        fields = json.loads(line[start:])
    except json.JSONDecodeError:
        return None
    stats = {}
    for key, value in fields.items():
        try:
            stats[key] = float(value)
        except (TypeError, ValueError):
            continue
    return stats if "num_updates" in stats or "valid_num_updates" in stats else None


def parse_log(lines: Iterable[str]) -> TrainingLog:
    """Read all lines of a log."""
    log = TrainingLog()
    for line in lines:
        log.add(line)
    return log


def read_log(path: Path) -> TrainingLog:
    """Read a log file."""
    with path.open(errors="replace") as lines:
        return parse_log(lines)
