"""Pictures of how signal, gradient and first update depend on depth, architecture by architecture.

The coordinate check of microsoft/mup, for depth: what an initialisation holds constant is a level line.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from coldstart.depth import verdict
from coldstart.plots import DASHED, DOTTED, INK, LOOKS, empty_figure, finish, log_axis, log_limits
from coldstart.probe import DepthProbe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_depth"]

COLOURS = tuple(colour for style, colour in LOOKS if style == "-")
STACKS = ("-", DASHED, DOTTED)  # the lines of an architecture's encoder, decoder, ...
Quantity = Callable[[DepthProbe], Mapping[str, float]]  # by stack; by "" for a quantity of the whole model
PANELS: tuple[tuple[str, str, Quantity], ...] = (
    ("Signal: what a stack makes of its stream", "norm behind over norm before", lambda probe: probe.signal),
    ("Gradient", "norm, all parameters", lambda probe: {"": probe.gradient_norm}),
    ("First update: change of the function", "||F(W + dW) - F(W)||", lambda probe: {"": probe.function_change}),
    ("What it leaves of the output's spread", "spread after over before", lambda probe: {"": probe.kept_spread}),
)
CEILING = 1e4  # times the median of a panel: where one architecture explodes, the others can be told apart still


class _Line(NamedTuple):
    label: str
    colour: str
    style: object
    depths: list[int]
    values: list[float]


def draw_depth(measured: Mapping[str, Sequence[tuple[int, DepthProbe]]], title: str = "Depth") -> Figure:
    """A matplotlib figure with a line for each architecture: N against signal, gradient and first update.

    Below are the verdicts of :func:`coldstart.depth.verdict`, where there are measurements enough. A cross at the upper
    edge is a value that is not finite, or beyond :data:`CEILING`, one at the lower edge a value of zero. Of several
    measurements at one N, as with several seeds, the line goes through the median.

    Args:
        measured: for each architecture pairs of N and what was measured there, all with the same batch and loss.
        title: stands above the picture.

    Raises:
        ImportError: matplotlib is not installed; the sentence says what to type.
        ValueError: nothing was measured.
    """
    if not any(measured.values()):
        raise ValueError("there are no measurements to draw")
    lines = [list(_lines(measured, quantity)) for _, _, quantity in PANELS]
    legend_height = 0.3 + 0.2 * max(map(len, lines))
    figure = empty_figure(19, 4.6 + legend_height)
    figure.suptitle(title, x=0.012, ha="left", fontsize=15, weight="bold", color=INK)
    grid = figure.add_gridspec(2, len(PANELS), height_ratios=[4, legend_height])
    for column, ((panel, unit, _), own) in enumerate(zip(PANELS, lines, strict=True)):
        axes, below = (figure.add_subplot(grid[row, column]) for row in (0, 1))
        _draw_lines(axes, own)
        finish(axes, panel, pad=12, xlabel="layers N", ylabel=unit)
        below.axis("off")
        style = {"frameon": False, "fontsize": 9, "loc": "upper left", "borderaxespad": 0}
        below.legend(*axes.get_legend_handles_labels(), **style).set_in_layout(False)
    return figure


def _lines(measured: Mapping[str, Sequence[tuple[int, DepthProbe]]], quantity: Quantity) -> Iterator[_Line]:
    """The lines of a panel: one for each architecture, or for each of its stacks."""
    for index, (architecture, probes) in enumerate(measured.items()):
        found = [(depth, quantity(probe)) for depth, probe in sorted(probes, key=lambda pair: pair[0])]
        stacks = list(dict.fromkeys(stack for _, values in found for stack in values))
        for number, stack in enumerate(stacks):
            depths, values = zip(*((depth, by[stack]) for depth, by in found if stack in by), strict=True)
            name = f"{architecture}, {stack}" if len(stacks) > 1 else architecture
            colour, style = COLOURS[index % len(COLOURS)], STACKS[number % len(STACKS)]
            yield _Line(_with_verdict(name, depths, values), colour, style, list(depths), list(values))


def _with_verdict(name: str, depths: Sequence[int], values: Sequence[float]) -> str:
    enough = len(depths) >= 3 and len(set(depths)) >= 2
    return f"{name}, {verdict(depths, values)}" if enough else name


def _draw_lines(axes: Axes, lines: Sequence[_Line]) -> None:
    """The lines, on logarithmic axes; what has no place on them is a cross at the edge."""
    positive = [value for line in lines for value in line.values if 0 < value < math.inf]
    ceiling = CEILING * statistics.median(positive or [1])
    foot, top = log_limits(value for value in positive if value <= ceiling)
    log_axis(axes, "y", (foot, top))
    depths = sorted({depth for line in lines for depth in line.depths})
    log_axis(axes, "x", log_limits(depths))
    axes.set_xticks(depths, list(map(str, depths)))
    axes.minorticks_off()
    for line in lines:
        pairs = list(zip(line.depths, line.values, strict=True))
        sound = [(depth, value) for depth, value in pairs if 0 < value <= ceiling]
        edges = [(depth, foot if value == 0 else top) for depth, value in pairs if (depth, value) not in sound]
        medians = {n: statistics.median(value for depth, value in sound if depth == n) for n, _ in sound}
        axes.plot(medians.keys(), medians.values(), color=line.colour, linestyle=line.style, label=line.label)
        axes.plot(*_columns(sound), "o", color=line.colour, markersize=4)
        if edges:
            axes.plot(*_columns(edges), "x", color=line.colour, markersize=7, clip_on=False, in_layout=False)


def _columns(pairs: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [depth for depth, _ in pairs], [value for _, value in pairs]
