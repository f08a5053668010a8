"""Reads the output of `fairseq-generate` and `fairseq-interactive`."""

from collections.abc import Iterable
from pathlib import Path

from console import UserError


def read_hypotheses(lines: Iterable[str], prefix: str = "H") -> list[str]:
    """The best hypothesis of each sentence, in the order of the test set.

    `prefix` is `H` for tokens as the model gives them and `D` for detokenised text. Raises `UserError` where a
    sentence has none, as when the output is cut short.
    """
    found: dict[int, str] = {}
    for line in lines:
        if line.startswith(f"{prefix}-"):
            name, _, text = line.rstrip("\n").split("\t", 2)
            found.setdefault(int(name[len(prefix) + 1 :]), text)
    if not found or max(found) != len(found) - 1:
        raise UserError(f"the output of fairseq-generate is incomplete ({len(found)} lines {prefix}-...); run it again")
    return [found[index] for index in sorted(found)]


def read_generated(path: Path, count: int, reference: Path, prefix: str = "H") -> list[str]:
    """The hypotheses in a file, of which there must be `count`, as many as `reference` has."""
    with path.open(encoding="utf-8") as lines:
        hypotheses = read_hypotheses(lines, prefix)
    if len(hypotheses) != count:
        raise UserError(
            f"{path} has {len(hypotheses)} hypotheses and {reference} {count} lines; "
            "give the reference of the split that was generated"
        )
    return hypotheses
