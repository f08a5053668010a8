"""Language models by the scripts, with the real commands on a few words; the studies' starts, tables and pictures."""

import json
from dataclasses import replace
from pathlib import Path

import benchmark_binarise
import benchmark_mimetic
import compare_mimetic
import plot_attention
import pytest
import quickstart
import score_perplexity
import torch
from console import UserError
from recipes import (
    BROWN,
    BROWN_CHARACTERS,
    MIMETIC_LM,
    POST_LN_WARMUP,
    PRE_LN,
    T_FIXUP,
    Recipe,
    decoder_options,
    text_at,
)
from training_log import TrainingLog

ROOT = Path(__file__).parents[2]
FILES = ("train.txt", "valid.txt", "test.txt")


@pytest.fixture
def text(tmp_path) -> Path:
    """A corpus of the names of `prepare_brown`, which finds it ready."""
    folder = tmp_path / "text"
    folder.mkdir()
    for name, lines in zip(FILES, (60, 10, 10), strict=True):
        (folder / name).write_text("the cat sat on the mat\n\nthe dog saw a cat\n" * lines)
    return folder


@pytest.fixture
def small(text, monkeypatch):
    """``small(recipe, level)``: the recipe in small."""
    monkeypatch.chdir(ROOT)

    def make(recipe: Recipe, level: str) -> Recipe:
        return replace(
            recipe,
            data=text,
            model=decoder_options(16, 16, 2, 1),
            updates=4,
            save_every=2,
            log_every=1,
            training=(*text_at(level, 16), "--criterion=cross_entropy", "--max-tokens=128", "--num-workers=0"),
            decoding=(*text_at(level, 16), "--context-window=8", "--max-tokens=128"),
        )

    return make


@pytest.mark.parametrize(("recipe", "level"), [(BROWN, "word"), (BROWN_CHARACTERS, "char")], ids=["word", "char"])
def test_quickstart_of_a_language_model(recipe, level, small, tmp_path, capsys):
    out = tmp_path / "run"
    quickstart.quickstart(small(recipe, level), out, compare=False, source=None, cpu=True)
    printed = capsys.readouterr().out
    assert "$ fairseq-eval-lm" in printed
    assert ("bits per character" in printed) == (level == "char")
    result = json.loads((out / "result.json").read_text())
    assert result["variant"] == "mimetic"
    assert "word perplexity" in result["test"]
    assert (out / "curves.png").exists()


def test_the_study_of_language_models(small, tmp_path):
    lab = compare_mimetic.Laboratory(tmp_path)
    recipe = small(BROWN, "word")
    runs = lab.measure(recipe, MIMETIC_LM, [1])
    assert [sorted(log.valid) for log in runs.logs] == [[2, 4]]
    assert runs.cell("word_ppl", 1) == f"{runs.last('word_ppl')[0]:.1f}"
    assert not list(tmp_path.glob("**/*.pt"))
    for zoom in (True, False):
        compare_mimetic.draw_curves({"plain": runs, "mimetic": runs}, "word_ppl", "", tmp_path / "c.png", zoom=zoom)
        assert (tmp_path / "c.png").stat().st_size > 5000


def test_a_start_that_diverged_is_said_so():
    log = TrainingLog(valid={2: {"loss": 1.5}})
    assert compare_mimetic.Runs((log,), 2).cell("loss", 2) == "1.50 (1 of 2 diverged)"


@pytest.mark.parametrize("base", [POST_LN_WARMUP, PRE_LN, T_FIXUP], ids=lambda base: base.name)
def test_fairseq_accepts_mimetic_translation(base, plugin):
    from fairseq import options

    command = compare_mimetic.G2P.train(Path("run"), compare_mimetic.mimetic(base))
    args = options.parse_args_and_arch(options.get_training_parser(), command[1:])
    assert (args.mimetic_qk, args.mimetic_vo) == ("0,0.5", "0.2,0.2")
    assert args.arch == ("transformer_tfixup" if base == T_FIXUP else "transformer_mimetic")


def test_the_last_report_of_an_evaluation_counts(tmp_path):
    output = tmp_path / "out"
    output.write_text(
        "test: word perplexity 900.00 (1 words)\ntest: word perplexity 12.50, 1.2345 bits per character (3 words)"
    )
    assert score_perplexity.score_file(output) == score_perplexity.PerplexityScore(12.5, 1.2345)
    output.write_text("Perplexity: 3")
    with pytest.raises(UserError, match="has no word perplexity"):
        score_perplexity.score_file(output)


def test_attention_maps():
    places = plot_attention.positions(6, 32)
    assert (places.shape, places.dtype) == ((6, 32), torch.float32)
    plain = plot_attention.mean_map(None, 32, 4, places, 200)
    mimetic = plot_attention.mean_map((0, 0.5), 32, 4, places, 200)
    theory = 0.5 * 8 / 32 * (32 * torch.eye(6) + places @ places.T)
    assert (mimetic - theory).abs().max() < 0.5
    assert plain.abs().max() < 0.2 * mimetic.diagonal().mean()


def test_picture_of_attention(tmp_path):
    plot_attention.draw({"plain": torch.zeros(4, 4), "theory": torch.eye(4)}, tmp_path / "attention.png")
    assert (tmp_path / "attention.png").stat().st_size > 5000


def test_benchmark_of_the_initialisation():
    size, ours, book, ratio = benchmark_mimetic.measure(benchmark_mimetic.parse_size("16x4x2"), 6)
    assert size == "16 / 2 (4 heads)"
    assert all(float(number) >= 0 for number in (ours, book, ratio))


def test_benchmark_of_the_binary_files(text):
    assert "| 0 MB, 1 workers |" in benchmark_binarise.benchmark(text, copies=1, workers=[1], rounds=1)
