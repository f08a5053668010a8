"""Pictures of depth: the lines are the measurements, the legend has the verdicts, and overflow is at the edge."""

import math
import sys

import pytest

from coldstart.depth_plots import draw_depth
from coldstart.probe import BlockProbe, DepthProbe

DEPTHS = (6, 12, 24)


def probe(signal=2.0, gradient=1.0, change=0.5, stacks=("encoder",)):
    blocks = [BlockProbe(stack, f"{stack}.layers.0", "feed-forward", 1.0, 0.1, signal, 1.0, 1.0) for stack in stacks]
    return DepthProbe(tuple(blocks), 3.0, 2.9, gradient, 10.0, change, 1.0, 0.5)


def lines_of(axes):
    """Of each line by its label: the points."""
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()}


def crosses_of(axes):
    """The N of all crosses, and where they stand."""
    data = [line.get_data() for line in axes.get_lines() if line.get_marker() == "x"]
    return [n for depths, _ in data for n in depths], [height for _, heights in data for height in heights]


@pytest.fixture(autouse=True)
def matplotlib():
    pytest.importorskip("matplotlib")


def test_each_panel_has_a_line_for_each_architecture_with_its_verdict():
    measured = {
        "T-Fixup": [(n, probe(1.1, 1.0, 0.1)) for n in reversed(DEPTHS)],
        "Post-LN": [(n, probe(1.0, float(n), 1 / n)) for n in DEPTHS],
    }
    signal, _, gradient, _, update, _, spread, _ = draw_depth(measured).axes
    flat = "flat: N^(0.00 ± 0.00)"
    assert lines_of(signal)[f"T-Fixup, {flat}"] == [(n, 1.1) for n in DEPTHS]
    assert lines_of(gradient)["Post-LN, growing: N^(1.00 ± 0.00)"] == [(n, float(n)) for n in DEPTHS]
    assert lines_of(update)["Post-LN, shrinking: N^(-1.00 ± 0.00)"] == [(n, 1 / n) for n in DEPTHS]
    assert lines_of(spread)[f"T-Fixup, {flat}"] == [(n, 0.5) for n in DEPTHS]
    assert [axes.get_yscale() for axes in (signal, gradient, update, spread)] == ["log"] * 4
    assert [text.get_text() for text in signal.get_xticklabels()] == ["6", "12", "24"]


def test_each_stack_has_its_line_where_there_are_several():
    signal, below, gradient, *_ = draw_depth({"Post-LN": [(6, probe(stacks=("encoder", "decoder")))]}).axes
    assert {"Post-LN, encoder", "Post-LN, decoder"} <= set(lines_of(signal))
    assert "Post-LN" in lines_of(gradient)
    assert [text.get_text() for text in below.get_legend().get_texts()] == ["Post-LN, encoder", "Post-LN, decoder"]


def test_overflow_is_at_the_upper_edge_and_zero_at_the_lower():
    values = {6: 1.0, 12: math.nan, 24: math.inf, 48: 0.0}
    signal = draw_depth({"Xavier": [(n, probe(value)) for n, value in values.items()]}).axes[0]
    foot, top = signal.get_ylim()
    assert lines_of(signal)["Xavier, growing: not finite at N = 12"] == [(6, 1.0)]
    assert crosses_of(signal) == ([12, 24, 48], pytest.approx([top, top, foot]))


def test_an_explosion_does_not_flatten_the_others():
    measured = {"T-Fixup": [(n, probe(1.1)) for n in DEPTHS], "Xavier": [(6, probe(16.0)), (12, probe(1e9))]}
    signal = draw_depth(measured).axes[0]
    assert signal.get_ylim()[1] < 100
    assert crosses_of(signal) == ([12], pytest.approx([signal.get_ylim()[1]]))


def test_of_several_seeds_the_line_goes_through_the_median():
    measured = {"T-Fixup": [(n, probe(gradient=value)) for n in DEPTHS for value in (1.0, 4.0, 2.0)]}
    gradient = draw_depth(measured).axes[2]
    assert next(iter(lines_of(gradient).values())) == [(n, 2.0) for n in DEPTHS]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [1.0, 0.0, math.nan])
def test_whatever_was_measured_has_a_picture(value, tmp_path):
    measured = {f"architecture {k}": [(n, probe(value, value, value, ("a", "b"))) for n in DEPTHS] for k in range(12)}
    draw_depth(measured, "Everything").savefig(tmp_path / "depth.png", dpi=40)
    assert (tmp_path / "depth.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("nothing", [{}, {"T-Fixup": []}])
def test_nothing_to_draw(nothing):
    with pytest.raises(ValueError, match="no measurements"):
        draw_depth(nothing)


def test_without_matplotlib_one_sentence_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'coldstart\[plots\]'"):
        draw_depth({"T-Fixup": [(6, probe())]})
