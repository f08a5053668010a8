"""Pictures of learned scales: which parameters they changed, what that did to the model, how they were found.

matplotlib is an optional extra (``pip install 'coldstart[plots]'``); it is imported when something is drawn.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from coldstart.scales import Scales, is_bias

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

__all__ = ["Place", "draw", "place_of"]

BLUE, RED, GREEN, AMBER, PURPLE = "#1b6ca8", "#d1495b", "#66a182", "#edae49", "#5d5179"
TEAL, PINK, BROWN, OLIVE, INK = "#2ca6a4", "#c77da3", "#8c5e3c", "#87912f", "#3d4148"
GREY = "#8d96a3"
DASHED, DOTTED = (0, (3, 2)), (0, (1, 1.5))
LOOKS = tuple(product(("-", DASHED, DOTTED), (BLUE, AMBER, RED, GREEN, PURPLE, TEAL, PINK, BROWN, OLIVE, INK)))
MARKERS = {"weight": "o", "gain": "^", "bias": "s"}  # the rows of panels, from the top
APART = "in no layer"
LISTED = 20  # parameters in no layer: where there are more, their names are left out
TICKS = {5: (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), 30: (1, 1.5, 2, 3, 5, 7), 500: (1, 2, 5)}  # up to this high / low


class Place(NamedTuple):
    """Where a parameter stands, e.g. in ``encoder.layers``, 3, as ``self_attn.q_proj``; the bias in the same place.

    What is in no layer, as most embeddings are, has its whole name for its kind, without the ending.
    """

    stack: str
    layer: int | None
    kind: str


def place_of(name: str) -> Place:
    """Where a parameter stands, by its name: the first part of it that is all digits is the layer."""
    parts = re.sub(r"[._](weight|bias)$", "", f".{name}").split(".")[1:]
    index = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    if index is None:
        return Place(APART, None, ".".join(parts))
    return Place(".".join(parts[:index]) or "layers", int(parts[index]), ".".join(parts[index + 1 :]))


def draw(scales: Scales, title: str = "Learned scales") -> Figure:
    """A matplotlib figure of all that there is: the scales, and statistics and history where they were recorded.

    Args:
        scales: the scales.
        title: stands above the picture, over the settings.

    Raises:
        ImportError: matplotlib is not installed; the sentence says what to type.
        ValueError: there are no scales.
    """
    parameters = _parameters(scales)
    sections = [(0.3 + sum(_rows(parameters)[1]), _draw_scales)]
    if scales.statistics is not None:
        sections.append((7.2, _draw_statistics))
    if scales.history:
        sections.append((3.4, _draw_history))
    heights = [0.8, *(height for height, _ in sections)]
    figure = empty_figure(13, sum(heights))
    header, *places = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    header.text(0.012, 0.68, title, fontsize=15, weight="bold", color=INK, va="center")
    given = {name: scales.settings.get(name) for name in ("optimizer", "eta", "gamma", "lr", "iterations")}
    given = {name: f"{value:g}" if isinstance(value, float) else value for name, value in given.items()}
    settings = ",  ".join(f"{name} {value}" for name, value in given.items() if value is not None)
    header.text(0.012, 0.22, settings, fontsize=10, color=INK, va="center")
    for place, (_, draw_section) in zip(places, sections, strict=True):
        draw_section(place, scales, parameters)
    return figure


def empty_figure(width: float, height: float) -> Figure:
    """A figure without axes, of a size in inches.

    Raises:
        ImportError: matplotlib is not installed; the sentence says what to type.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("matplotlib is not installed; run: pip install 'coldstart[plots]'") from None
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.09)
    return figure


class _Parameter(NamedTuple):
    """A parameter with its looks. ``home``: its row of panels; for a bias, that of the weight in the same place.

    ``line``: the home and the kind, as convolutions and normalisations in a sequence are of one kind by their names.
    """

    name: str
    scale: float
    place: Place
    bias: bool
    home: str
    line: tuple[str, str]
    label: str
    style: dict[str, Any]


def _parameters(scales: Scales) -> list[_Parameter]:
    """Stack by stack, weights first, kind by kind, layer by layer; then those in no layer, as the model has them."""
    if not scales.scales:
        raise ValueError("there are no scales to draw")
    places = {name: place_of(name) for name in scales.scales}
    homes = dict.fromkeys(places.values(), "bias")
    homes |= {place: "weight" if len(scales.shapes[n]) > 1 else "gain" for n, place in places.items() if not is_bias(n)}
    layered = [place for home in MARKERS for place in homes if homes[place] == home and place.layer is not None]
    looks = dict(zip(dict.fromkeys(place.kind for place in layered), LOOKS, strict=False))
    parameters = []
    for name, place in places.items():
        home, bias = homes[place], is_bias(name)
        style, colour = looks.get(place.kind, ("-", GREY))
        size = {"alpha": 0.55, "linewidth": 1, "markersize": 3.5} if bias else {"markersize": 5}
        drawn = {"color": colour, "linestyle": style, "marker": MARKERS[home], **size}
        label, line = _tail(place.kind or home, 36), (home, place.kind)
        parameters.append(_Parameter(name, scales.scales[name], place, bias, home, line, label, drawn))
    stacks = [place.stack for place in homes]
    lines = [(homes[place], place.kind) for place in layered]
    in_layers = [p for p in parameters if p.place.layer is not None]
    in_layers.sort(key=lambda p: (stacks.index(p.place.stack), lines.index(p.line), p.place.layer))
    return in_layers + [p for p in parameters if p.place.layer is None]


def _grouped(parameters: Iterable[_Parameter], key: Callable[[_Parameter], Any]) -> dict[Any, list[_Parameter]]:
    groups: dict[Any, list[_Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(key(parameter), []).append(parameter)
    return groups


def _rows(parameters: Iterable[_Parameter]) -> tuple[dict[str, list[_Parameter]], list[float]]:
    """The parameters by row of panels, and the heights of the rows in inches, with room for legends and names.

    What is in no layer stands beside the biases, or else in a row of its own.
    """
    groups = _grouped(parameters, lambda p: APART if p.place.layer is None else "bias" if p.bias else p.home)
    rows = {row: groups[row] for row in (*MARKERS, APART) if row in groups}
    heights = {row: max(2.7, 0.3 + 0.18 * len({p.line for p in rows[row]})) for row in MARKERS if row in rows}
    if APART in rows:
        beside, count = "bias" if "bias" in rows else APART, len(rows[APART])
        heights[beside] = max(heights.get(beside, 0), 0.9 + 0.34 * count if count <= LISTED else 4)
    return rows, list(heights.values())


def _draw_scales(figure: SubFigure, scales: Scales, parameters: Sequence[_Parameter]) -> None:
    """The scales by layer: a column for each stack, a row for weights, gains and biases, a line for each kind."""
    rows, heights = _rows(parameters)
    apart = rows.pop(APART, [])
    stacks = _grouped((p for p in parameters if p.place.layer is not None), lambda p: p.place.stack)
    layers = ([p.place.layer for p in members] for members in stacks.values())
    spans = [(min(numbers), max(numbers)) for numbers in layers]
    widths = [max(last - first + 1, 3) for first, last in spans]
    widths.append(0.4 * sum(widths) or 1)
    grid = figure.add_gridspec(len(heights), len(widths), width_ratios=widths, height_ratios=heights)
    for index, (row, members) in enumerate(rows.items()):
        limits = log_limits([0.8, 1.25, *(p.scale for p in members)])
        for column, (stack, (first, last)) in enumerate(zip(stacks, spans, strict=True)):
            axes = figure.add_subplot(grid[index, column])
            _draw_lines(axes, [p for p in members if p.place.stack == stack], limits)
            bottom, title = index == len(rows) - 1, _tail(stack, int(110 * widths[column] / sum(widths)))
            axes.set_xlim(first - 0.5, last + 0.5)
            axes.locator_params(axis="x", integer=True, nbins=10)
            axes.tick_params(labelleft=column == 0, labelbottom=bottom)
            labels = {"xlabel": "layer" if bottom else "", "ylabel": "" if column else f"{row} scale"}
            finish(axes, "" if index else title, **labels)
        if row != "bias":
            _legend(figure.add_subplot(grid[index, -1]), members)
    if apart:
        _draw_apart(figure.add_subplot(grid[-1, -1] if "bias" in rows else grid[-1, :]), apart)


def _draw_lines(axes: Axes, members: Sequence[_Parameter], limits: tuple[float, float]) -> None:
    """One line for each kind over the layers; a scale of 0 stands at the foot."""
    foot = limits[0]
    for line in _grouped(members, lambda p: p.line).values():
        axes.plot([p.place.layer for p in line], [max(p.scale, foot) for p in line], clip_on=False, **line[0].style)
    if any(p.scale < foot for p in members):
        axes.annotate("at the foot: 0", (0.015, 0.05), xycoords="axes fraction", fontsize=8, color=INK)
    axes.axhline(1, color=INK, linewidth=0.8, zorder=0)
    log_axis(axes, "y", limits)


def _legend(axes: Axes, members: Iterable[_Parameter]) -> None:
    from matplotlib.lines import Line2D

    axes.axis("off")
    looks = {"others" if p.style["color"] == GREY else p.label: Line2D([], [], **p.style) for p in members}
    style = {"frameon": False, "fontsize": 9, "borderaxespad": 0, "labelspacing": 0.35, "handlelength": 2.6}
    axes.legend(looks.values(), looks.keys(), loc="upper left", **style).set_in_layout(False)


def _draw_apart(axes: Axes, apart: Sequence[_Parameter]) -> None:
    """The scales of parameters in no layer, one below the other with their names."""
    limits = log_limits([0.8, 1.25, *(p.scale for p in apart)])
    for position, parameter in enumerate(apart):
        alpha = 0.5 if parameter.bias else 1
        value = max(parameter.scale, limits[0])
        style = {"color": BLUE, "linewidth": 1.2, "markersize": 5, "markevery": [1], "alpha": alpha, "clip_on": False}
        axes.plot([1, value], [position] * 2, "o-", **style)
        if len(apart) <= LISTED:
            style = {"fontsize": 8.5, "color": INK, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}}
            place = (0, position - 0.18, _tail(parameter.name, 40))
            axes.text(*place, va="bottom", transform=axes.get_yaxis_transform(), **style)
    axes.axvline(1, color=INK, linewidth=0.8, zorder=0)
    axes.set_ylim(len(apart) - 0.4, -0.9)
    axes.set_yticks([])
    log_axis(axes, "x", limits)
    finish(axes, APART, xlabel="scale")
    axes.spines["left"].set_visible(False)


def _draw_statistics(figure: SubFigure, scales: Scales, parameters: Sequence[_Parameter]) -> None:
    """Weight norms and gradient variances before and after, parameter by parameter: the paper's figures 9 and 10.

    Each kind is a run from the first layer to the last; a bias stands fainter in the place of its weight.
    """
    statistics = scales.statistics
    norm_after = {p.name: statistics.weight_norm[p.name] * abs(p.scale) for p in parameters}
    runs = list(_grouped(parameters, lambda p: (p.place.stack, p.line)).values())
    x = _positions(runs)
    spans = [(x[run[0].name], x[run[-1].name]) for run in runs]
    end = spans[-1][1] + 2
    norms, variances = figure.subplots(2, 1, sharex=True)
    _draw_before_and_after(norms, parameters, x, statistics.weight_norm, norm_after)
    _draw_before_and_after(variances, parameters, x, statistics.variance_before, statistics.variance_after)
    finish(norms, "Size of each parameter", pad=24, ylabel="Frobenius norm", xlim=(-2, end))
    finish(variances, "How much the gradient of each parameter differs between batches", ylabel="gradient variance")
    few = slice(None, None, math.ceil(len(runs) / 70))  # of so many labels one is legible
    variances.set_xticks([sum(span) / 2 for span in spans[few]], [run[0].label for run in runs[few]])
    variances.tick_params(axis="x", rotation=90, labelsize=8, length=0)
    norms.tick_params(axis="x", length=0)
    for stack in dict.fromkeys(p.place.stack for p in parameters):
        own = [span for run, span in zip(runs, spans, strict=True) if run[0].place.stack == stack]
        at, side = (end, "right") if stack == APART else (own[0][0] - 0.8, "left")
        label = stack if stack == APART else _tail(stack, 5 + int(140 * (own[-1][1] - at) / end))
        above = ((at, 1), (0, 4), ("data", "axes fraction"), "offset points")
        norms.annotate(label, *above, ha=side, fontsize=10, color=INK, in_layout=False)
        for axes, (first, last) in product((norms, variances), own[::2]):
            axes.axvspan(first - 0.8, last + 0.8, color=GREY, alpha=0.1, linewidth=0)
            axes.grid(visible=False, axis="x")
    for label, colour, size in (("before", GREY, 4), ("after", BLUE, 4), ("biases (fainter)", BLUE + "66", 3)):
        norms.plot([], [], "o", color=colour, markersize=size, markeredgewidth=0, label=label)
    norms.plot([], [], " ", label="at the foot: 0, or below the axis")
    style = {"ncols": 4, "frameon": False, "fontsize": 9, "handletextpad": 0.1, "borderaxespad": 0}
    norms.legend(loc="lower right", bbox_to_anchor=(1, 1.08), **style).set_in_layout(False)


def _positions(runs: Iterable[Sequence[_Parameter]]) -> dict[str, float]:
    """Where each parameter stands on the x axis, with room between kinds and more between stacks."""
    positions: dict[str, float] = {}
    x, stack = -4.0, None
    for run in runs:
        layers = list(dict.fromkeys(p.place.layer for p in run))
        slack = max(0, 3 - len(layers)) / 2  # room for the label of a short run
        x += slack + (4 if run[0].place.stack != stack else 0)
        positions |= {p.name: x + layers.index(p.place.layer) for p in run}
        x, stack = x + len(layers) + slack + 1, run[0].place.stack
    return positions


def _draw_before_and_after(
    axes: Axes, parameters: Sequence[_Parameter], x: dict[str, float], before: dict[str, float], after: dict[str, float]
) -> None:
    """Two dots for each parameter, with a line from one to the other; what is too low for the axis is at its foot."""
    of_weights = [figures[p.name] for p in parameters if not p.bias for figures in (before, after)]
    values = [*before.values(), *after.values()]
    lowest = log_limits(of_weights or values)[0] / 20  # the gradient of a key's bias is nothing but rounding
    limits = log_limits(value for value in values if value > lowest)
    for bias, alpha, size in ((True, 0.4, 2.2), (False, 1, 3.8)):
        names = [p.name for p in parameters if p.bias == bias]
        at = [x[name] for name in names]
        low, high = ([max(figures[name], limits[0]) for name in names] for figures in (before, after))
        axes.vlines(at, low, high, color=BLUE, linewidth=0.8, alpha=0.5 * alpha, zorder=1)
        for dots, colour in ((low, GREY), (high, BLUE)):
            style = {"color": colour, "alpha": alpha, "markersize": size, "markeredgewidth": 0}
            axes.plot(at, dots, "o", clip_on=False, in_layout=False, **style)
    log_axis(axes, "y", limits)


def _draw_history(figure: SubFigure, scales: Scales, _: Sequence[_Parameter]) -> None:
    """The iterations: the gradient norm against gamma with the branch that was taken, and the two losses."""
    left, right = figure.subplots(1, 2)
    history, gamma = dict(enumerate(scales.history, 1)), scales.settings.get("gamma")
    gamma = gamma if isinstance(gamma, (int, float)) else 0
    norms = {i: record.gradient_norm for i, record in history.items()}
    losses = {i: record.loss for i, record in history.items()}
    left.plot(norms.keys(), norms.values(), color=GREY, linewidth=0.8, alpha=0.6, zorder=1)
    right.plot(losses.keys(), losses.values(), ".-" if len(losses) <= 30 else "-", color=GREY, label="loss")
    for axes, values, colour, label in (
        (left, {i: norms[i] for i in history if history[i].constrained}, RED, "above gamma: lowers the norm"),
        (left, {i: norms[i] for i in history if not history[i].constrained}, BLUE, "lowers the loss"),
        (right, {i: record.updated_loss for i, record in history.items()}, BLUE, "loss after the first step"),
    ):
        dots = {i: value for i, value in values.items() if value is not None}
        if dots:
            size = 14 if len(history) <= 400 else 6
            axes.scatter(dots.keys(), dots.values(), s=size, color=colour, linewidths=0, label=label)
    log_axis(left, "y", log_limits([*norms.values(), gamma]))
    if gamma > 0:
        left.axhline(gamma, color=INK, linewidth=1, linestyle=DASHED, label=f"gamma = {gamma:g}")
    finish(left, "Gradient norm, and what each iteration did", ylabel="gradient norm")
    finish(right, "Loss before and after the optimiser's first step", ylabel="loss")
    for axes in (left, right):
        axes.set(xlabel="iteration", xlim=(0, len(history) + 1))
        axes.locator_params(axis="x", integer=True)
        axes.legend(frameon=False, fontsize=9)


def log_limits(values: Iterable[float]) -> tuple[float, float]:
    """Ends of a logarithmic axis for the positive ones of the values."""
    positive = [value for value in values if value > 0] or [0.1, 10]
    low, high = min(positive), max(positive)
    margin = max((high / low) ** 0.06, 1.1)
    return low / margin, high * margin


def log_axis(axes: Axes, axis: str, limits: tuple[float, float]) -> None:
    """A logarithmic axis; one of few decades has plain numbers, as 10^0 alone would say nothing."""
    from matplotlib import ticker

    ratio = limits[1] / limits[0]
    axes.set(**{f"{axis}scale": "log", f"{axis}lim": limits})
    multiples = next((numbers for most, numbers in TICKS.items() if ratio <= most), None)
    if multiples:
        line = getattr(axes, f"{axis}axis")
        line.set_major_locator(ticker.LogLocator(base=10, subs=multiples, numticks=30))
        line.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        line.set_minor_locator(ticker.NullLocator())


def finish(axes: Axes, title: str, pad: float | None = None, **properties: Any) -> None:
    """Title, labels and the look that all panels share."""
    axes.set(**properties)
    axes.set_title(title, loc="left", fontsize=11, weight="bold", color=INK, pad=pad)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _tail(text: str, length: int) -> str:
    return text if len(text) <= length else "…" + text[len(text) - max(length, 3) + 1 :]
