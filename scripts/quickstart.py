"""Prepare data, train, generate, score, show: a whole recipe in one command, which goes on where it stopped.

    python scripts/quickstart.py [g2p | g2p_full | multi30k | brown | brown_characters] [--compare]

Every command that it runs is printed, to be copied.
"""

import argparse
import os
from pathlib import Path

from console import announce, one_sentence_errors, run
from generated import read_hypotheses
from plot_curves import plot
from prepare_cmudict import known_words, spell
from recipes import MIMETIC_LM, PLAIN_LM, POST_LN, RECIPES, T_FIXUP, Recipe
from score_bleu import read_text
from steps import prepare, train_and_score
from training_run import cuda_is_available, exit_on_sigterm

NEW_WORDS = ("fairseq", "coldstart", "tfixup", "pytorch", "tokenizer", "gradinit", "backprop", "jupyterhub")
EXAMPLES = 10


def title(text: str) -> None:
    """Announce a step."""
    print(f"\n== {text}", flush=True)


def show_pronunciations(recipe: Recipe, folder: Path, cpu: bool) -> None:
    """Pronounce words that the dictionary does not have, and say how to ask for more."""
    title("words that are in no dictionary")
    known = known_words()
    words = [word for word in NEW_WORDS if word not in known]
    spelled = "".join(f"{spell(word)}\n" for word in words)
    command = recipe.interactive(folder, cpu)
    announce(command)
    output = run(command, folder / "interactive.out", stdin=spelled)
    for word, phones in zip(words, read_hypotheses(output.splitlines()), strict=True):
        print(f"  {word:12} {phones}")
    print("ask for more with the same command: it reads words, with spaces between the letters (q u a r k)")


def show_translations(recipe: Recipe, folder: Path) -> None:
    """Print translations of the test set beside source and reference."""
    title("translations of the test set")
    lines = (folder / "generate-test.txt").read_text(encoding="utf-8").split("\n")
    translations = read_hypotheses(lines, "D")
    german, english = (read_text(recipe.data / "raw" / f"test.{language}") for language in ("de", "en"))
    step = len(translations) // EXAMPLES
    for index in range(0, EXAMPLES * step, step):
        print(f"  German     {german[index]}\n  model      {translations[index]}\n  reference  {english[index]}\n")


def quickstart(recipe: Recipe, out: Path, compare: bool, source: Path | None, cpu: bool) -> None:
    """Run every step of a recipe, those that are done already excepted."""
    title(f"data: {recipe.data}")
    prepare(recipe, source)
    ours, usual = (MIMETIC_LM, PLAIN_LM) if recipe.task == "language_model" else (T_FIXUP, POST_LN)
    folders = {ours: out}
    if compare:
        folders[usual] = out.with_name(f"{out.name}-{usual.name}")
    results = {}
    for variant, folder in folders.items():
        title(variant.label)
        results[variant] = train_and_score(recipe, variant, folder, cpu)
        print(results[variant].score)
    if recipe.task == "g2p":
        show_pronunciations(recipe, out, cpu)
    elif recipe.task == "translation":
        show_translations(recipe, out)
    title("result")
    picture = out / "curves.png"
    plot({variant.label: result.log for variant, result in results.items()}, picture, f"{recipe.name}: loss")
    for variant, result in results.items():
        minutes = f"{result.train_seconds / 60:.1f} minutes of training"
        print(f"{variant.label}: {result.score}, {minutes}; all files: {folders[variant]}")
    print(f"learning curve: {picture}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare, train, generate and score in one command.")
    parser.add_argument("recipe", nargs="?", choices=RECIPES, default="g2p", help="default: g2p")
    parser.add_argument("--compare", action="store_true", help="also train what is usual: Post-LN, plain attention")
    parser.add_argument("--out", type=Path, help="folder for the results; default: runs/RECIPE")
    parser.add_argument("--updates", type=int, help="train for so many updates instead of the recipe's number")
    source = os.environ.get("SOURCE")
    parser.add_argument("--source", type=Path, default=source, help="folder with the data's files (or $SOURCE)")
    args = parser.parse_args()
    exit_on_sigterm()
    with one_sentence_errors():
        recipe = RECIPES[args.recipe].shortened(args.updates)
        out = args.out.absolute() if args.out else Path("runs") / recipe.name
        source = args.source.absolute() if args.source else None
        os.chdir(Path(__file__).resolve().parent.parent)
        quickstart(recipe, out, args.compare, source, cpu=not cuda_is_available())


if __name__ == "__main__":
    main()
