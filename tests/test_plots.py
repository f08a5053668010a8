"""Pictures of scales: where parameters stand by their names, and which panels are drawn for which data."""

import sys
from dataclasses import replace

import pytest

from coldstart.plots import Place, draw, place_of
from coldstart.scales import Iteration, Scales, Statistics

HISTORY = (Iteration(True, 1500.0, 9.0, None), Iteration(False, 900.0, 8.8, 8.1), Iteration(False, 950.0, 8.7, 8.0))


def transformer_shapes(layers=3):
    shapes = {"encoder.embed_tokens.weight": (20, 8)}
    for side, attentions in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"])):
        for stem in (f"{side}.layers.{layer}" for layer in range(layers)):
            for attention in attentions:
                for matrix in ("k_proj", "v_proj", "q_proj", "out_proj"):
                    shapes[f"{stem}.{attention}.{matrix}.weight"] = (8, 8)
                    shapes[f"{stem}.{attention}.{matrix}.bias"] = (8,)
                shapes[f"{stem}.{attention}_layer_norm.weight"] = (8,)
            shapes |= {f"{stem}.fc1.weight": (16, 8), f"{stem}.fc1.bias": (16,), f"{stem}.fc2.weight": (8, 16)}
    return shapes


SHAPES = {
    "transformer": transformer_shapes(),
    "sequence": {f"features.{index}.weight": (8, 3, 3, 3) for index in (0, 3, 6)}
    | {"features.1.weight": (8,), "features.1.bias": (8,), "features.3.bias": (8,), "classifier.weight": (10, 8)},
    "resnet": {"conv1.weight": (8, 3, 7, 7), "fc.bias": (10,)}
    | {f"layer{stage}.{block}.conv1.weight": (8, 8, 3, 3) for stage in (1, 2, 3, 4) for block in range(stage)},
    "no layers": {"conv1.weight": (8, 3, 3, 3), "fc.weight": (10, 8), "fc.bias": (10,)},
    "no names": {f"unit{index}.weight": (8, 8) for index in range(100)},
    "many kinds": {f"blocks.{layer}.unit{kind}.weight": (8, 8) for layer in (0, 1) for kind in range(40)},
    "one bias": {"0.bias": (1,)},
}


def scales_of(shapes):
    values = {name: 0.3 + index % 7 / 5 for index, name in enumerate(shapes)}
    norms = {name: 0.0 if name.endswith("bias") else 5.0 for name in shapes}
    variances = {name: 1e-23 if "k_proj.bias" in name else 1e-7 for name in shapes}
    statistics = Statistics(norms, variances, {name: value / 3 for name, value in variances.items()})
    return Scales(values, shapes, {"optimizer": "adam", "eta": 5e-4, "gamma": 1000.0}, HISTORY, statistics)


def texts(figure):
    """Every title, axis label and legend entry."""
    legends = [text for panel in figure.axes if panel.get_legend() for text in panel.get_legend().get_texts()]
    titles = {panel.get_title(loc="left") for panel in figure.axes}
    return titles | {panel.get_ylabel() for panel in figure.axes} | {text.get_text() for text in legends}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("encoder.layers.3.self_attn.q_proj.weight", Place("encoder.layers", 3, "self_attn.q_proj")),
        ("decoder.layers.10.encoder_attn.out_proj.bias", Place("decoder.layers", 10, "encoder_attn.out_proj")),
        ("layers.0.self_attn.in_proj_weight", Place("layers", 0, "self_attn.in_proj")),
        ("layer1.0.downsample.1.bias", Place("layer1", 0, "downsample.1")),
        ("features.3.weight", Place("features", 3, "")),
        ("0.weight", Place("layers", 0, "")),
        ("weights.2", Place("weights", 2, "")),
        ("fc1.weight", Place("in no layer", None, "fc1")),
    ],
)
def test_places(name, place):
    assert place_of(name) == place


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.filterwarnings("error")
def test_every_model_has_a_picture(shapes, tmp_path):
    pytest.importorskip("matplotlib")
    draw(scales_of(shapes)).savefig(tmp_path / "scales.png", dpi=40)
    assert (tmp_path / "scales.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("error")
def test_scales_of_zero_and_figures_of_zero(tmp_path):
    pytest.importorskip("matplotlib")
    scales = scales_of(SHAPES["transformer"])
    nothing = dict.fromkeys(scales.scales, 0.0)
    empty = replace(scales, scales=nothing, statistics=Statistics(nothing, nothing, nothing), settings={})
    draw(empty).savefig(tmp_path / "scales.png", dpi=40)


def test_a_transformer_has_its_stacks_side_by_side_and_its_kinds_in_the_legends():
    pytest.importorskip("matplotlib")
    found = texts(draw(scales_of(SHAPES["transformer"])))
    assert {"encoder.layers", "decoder.layers", "in no layer"} <= found
    assert {"weight scale", "gain scale", "bias scale"} <= found
    assert {"self_attn.q_proj", "encoder_attn.q_proj", "fc1", "self_attn_layer_norm"} <= found


def test_a_kind_looks_the_same_in_every_stack_and_row_and_unlike_the_others():
    pytest.importorskip("matplotlib")
    scales = replace(scales_of(SHAPES["transformer"]), statistics=None, history=())
    encoder, decoder, legend = draw(scales).axes[:3]
    lines = [
        [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.get_lines()[:-1]]
        for axes in (encoder, decoder)
    ]
    assert len(lines[0]) == len(set(lines[0])) == 6
    assert len(lines[1]) == len(set(lines[1])) == 10
    assert set(lines[0]) < set(lines[1])
    assert len(legend.get_legend().get_texts()) == 10


def test_lines_hold_the_scales_by_layer():
    pytest.importorskip("matplotlib")
    panel = draw(
        Scales({"h.1.fc.weight": 0.5, "h.0.fc.weight": 2.0}, dict.fromkeys(["h.1.fc.weight", "h.0.fc.weight"], (2, 2)))
    ).axes[0]
    line = panel.get_lines()[0]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 1], [2.0, 0.5])
    assert panel.get_yscale() == "log"


def test_panels_are_those_there_is_data_for():
    pytest.importorskip("matplotlib")
    scales = scales_of(SHAPES["transformer"])
    statistics, history = {"Frobenius norm", "gradient variance"}, {"gradient norm", "gamma = 1000", "loss"}
    assert statistics | history <= texts(draw(scales))
    assert not statistics & texts(draw(replace(scales, statistics=None)))
    assert not history & texts(draw(replace(scales, history=())))
    with pytest.raises(ValueError, match="no scales"):
        draw(Scales({}, {}))


def test_without_matplotlib_one_sentence_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'coldstart\[plots\]'"):
        draw(scales_of(SHAPES["transformer"]))
