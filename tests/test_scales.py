"""Scales in a file: what is written comes back, and nothing else is accepted."""

import copy
import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gradients import Language, assert_untouched, snapshot
from torch import nn

from coldstart.gradients import trainable_parameters
from coldstart.scales import Iteration, Scales, Statistics, parameter_shapes

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.text(st.characters(exclude_categories=["Cs"]))
RECORDS = st.builds(Iteration, st.booleans(), NUMBERS, NUMBERS, st.none() | NUMBERS)


@st.composite
def any_scales(draw):
    names = draw(st.lists(NAMES, unique=True, max_size=4))
    figures = st.fixed_dictionaries(dict.fromkeys(names, NUMBERS))
    shapes = st.fixed_dictionaries(dict.fromkeys(names, st.lists(st.integers(0, 9), max_size=3).map(tuple)))
    statistics = draw(st.none() | st.builds(Statistics, figures, figures, figures))
    options = draw(st.dictionaries(NAMES, st.none() | st.booleans() | NUMBERS | NAMES, max_size=3))
    return Scales(draw(figures), draw(shapes), options, tuple(draw(st.lists(RECORDS, max_size=3))), statistics)


def scales_of(model):
    shapes = parameter_shapes(model)
    history = (Iteration(True, 3.0, 2.0, None), Iteration(False, 1.0, 2.0, 1.5))
    figures = dict.fromkeys(shapes, 1.0)
    scales = {name: 0.5 + index for index, name in enumerate(shapes)}
    return Scales(scales, shapes, {"eta": 0.1}, history, Statistics(figures, figures, figures))


@settings(max_examples=50, deadline=None)
@given(any_scales())
def test_round_trip(tmp_path_factory, scales):
    file = tmp_path_factory.getbasetemp() / "new folder" / "scales.json"
    scales.save(file)
    loaded = Scales.load(file)
    assert loaded == scales
    assert loaded.fingerprint == scales.fingerprint
    assert os.listdir(file.parent) == ["scales.json"]


def test_a_tied_parameter_is_scaled_once_and_a_frozen_one_never():
    model = Language().double()
    before, scales = copy.deepcopy(model), scales_of(model)
    assert scales.check(model) == []
    assert scales.apply_(model) is model
    for name, parameter in trainable_parameters(before).items():
        assert torch.equal(model.get_parameter(name), scales.scales[name] * parameter)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.frozen.weight, before.frozen.weight)


def test_another_model_is_refused_and_left_alone(tmp_path):
    scales = scales_of(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(4, 2, bias=False), nn.Linear(2, 2, bias=False))
    sentences = [
        "the model has 2.weight, for which there is no scale",
        "there is a scale for 1.bias, which the model has not",
        "0.bias has shape (5,) in the model, but (4,) in the scales",
        "0.weight has shape (5, 3) in the model, but (4, 3) in the scales",
    ]
    assert scales.check(model) == sentences
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"for another model: the model has 2\.weight.* \(and 3 more\)"):
        scales.apply_(model)
    assert_untouched(model, before)
    scales.save(tmp_path / "scales.json")
    with pytest.raises(ValueError, match=r"scales\.json cannot be used: they are for another model"):
        Scales.load(tmp_path / "scales.json", model)


@pytest.mark.parametrize("failing", ["write", "replace", "encode"])
def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch, failing):
    file, scales = tmp_path / "scales.json", scales_of(nn.Linear(2, 2))
    scales.save(file)
    old = file.read_bytes()
    changed = Scales(dict.fromkeys(scales.shapes, float("nan") if failing == "encode" else 7.0), scales.shapes)
    if failing == "write":

        def write_half(path, text, encoding):
            path.write_bytes(text[: len(text) // 2].encode())
            raise OSError("no space left on device")

        monkeypatch.setattr("pathlib.Path.write_text", write_half)
    elif failing == "replace":

        def interrupted(source, target):
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises((OSError, KeyboardInterrupt, ValueError)):
        changed.save(file)
    assert file.read_bytes() == old
    assert os.listdir(tmp_path) == ["scales.json"]


def put(content, path, value):
    *folders, last = path
    for folder in folders:
        content = content[folder]
    content[last] = value


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (["format"], "other", "it is no file of scales"),
        (["version"], 2, "its format version is 2, but this coldstart reads version 1"),
        (["scales", "weight"], float("nan"), "it has the number NaN, which is not finite"),
        (["scales", "weight"], float("-inf"), "it has the number -Infinity, which is not finite"),
        (["settings", "eta"], float("inf"), "it has the number Infinity, which is not finite"),
        (["scales", "weight"], True, "the scale of weight must be a finite number, not True"),
        (["scales", "weight"], "1", "the scale of weight must be a finite number, not '1'"),
        (["scales", "weight"], None, "the scale of weight must be a finite number, not None"),
        (["scales", "weight"], 10**400, "too large to convert to float"),
        (["scales"], {"weight": 1.0}, "its parameters and the names of its scales differ, in bias first"),
        (["statistics", "weight_norm", "more"], 1.0, "its parameters and the names of its weight_norms differ"),
        (["statistics", "variance_after", "bias"], False, "variance_after of bias must be a finite number"),
        (["model", "shapes", "weight"], [2, 3], "its list of parameters was changed after it was written"),
        (["model", "shapes", "weight"], [2.0, 2], "a dimension must be a whole number, not 2.0"),
        (["model", "shapes", "weight"], [2, True], "a dimension must be a whole number, not True"),
        (["model", "shapes", "weight"], [-2, 2], "a dimension must be a whole number, not -2"),
        (["model"], {}, "it has no 'shapes'"),
        (["history", 0, "constrained"], 1, "'constrained' must be true or false, not 1"),
        (["history", 0, "gradient_norm"], None, "'gradient_norm' must be a finite number, not None"),
        (["history", 0, "updated_loss"], True, "'updated_loss' must be a finite number, not True"),
        (["history", 0], {"constrained": True}, "it has no 'updated_loss'"),
    ],
)
def test_an_edited_file_is_refused_in_one_sentence(tmp_path, path, value, sentence):
    file = tmp_path / "scales.json"
    scales_of(nn.Linear(2, 2)).save(file)
    content = json.loads(file.read_text())
    put(content, path, value)
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"scales\.json cannot be used: ") as refusal:
        Scales.load(file)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(tmp_path_factory, part):
    file = tmp_path_factory.getbasetemp() / "truncated.json"
    scales_of(nn.Linear(2, 2)).save(file)
    whole = file.read_bytes().rstrip()
    file.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(ValueError, match=r"truncated\.json cannot be used"):
        Scales.load(file)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff\xfe", b'{"format": "coldstart scales"}'])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match="file cannot be used: "):
        Scales.load(tmp_path / "file")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        Scales.load(tmp_path / "scales.json")
