"""The steps of a recipe: data, training, generation, score. Each does nothing when it is done already."""

import json
from dataclasses import dataclass
from pathlib import Path

import prepare_brown
import prepare_cmudict
import prepare_multi30k
import score_bleu
import score_g2p
import score_perplexity
from console import announce, run
from recipes import Recipe, Variant
from training_log import TrainingLog
from training_run import locked, train

Score = score_g2p.G2pScore | score_bleu.BleuScore | score_perplexity.PerplexityScore


@dataclass(frozen=True)
class Result:
    """A trained model: how training went, what it took, and its score on the test set."""

    log: TrainingLog
    train_seconds: float
    score: Score


def prepare(recipe: Recipe, source: Path | None = None) -> None:
    """Make the data set of a recipe; `source` has Multi30k's or Brown's files, for no download."""
    with locked(recipe.data.with_name(f".{recipe.data.name}.lock")):
        if recipe.task == "g2p":
            prepare_cmudict.prepare(recipe.data)
        elif recipe.task == "language_model":
            prepare_brown.prepare(recipe.data, source)
        else:
            prepare_multi30k.prepare(recipe.data, source)


def generate(recipe: Recipe, folder: Path, cpu: bool) -> Path:
    """Run the model on the test set and return the file with its output."""
    models_language = recipe.task == "language_model"
    done = folder / "generated"
    if not done.exists():
        command = recipe.evaluate(folder, cpu) if models_language else recipe.generate(folder, cpu)
        announce(command)
        run(command, folder / "generate.out")
        done.touch()
    return folder / ("generate.out" if models_language else "generate-test.txt")


def score(recipe: Recipe, output: Path) -> Score:
    """Score the output for the test set."""
    if recipe.task == "g2p":
        return score_g2p.score_files(recipe.data / "text" / "test.references.tsv", output)
    if recipe.task == "language_model":
        return score_perplexity.score_file(output)
    return score_bleu.score_files(recipe.data / "raw" / "test.en", output)


def train_and_score(recipe: Recipe, variant: Variant, folder: Path, cpu: bool) -> Result:
    """Train one variant, run it on the test set and score it; `{folder}/result.json` keeps the figures."""
    log = train(recipe.train(folder, variant, cpu), folder, recipe.updates)
    seconds = max(stats.get("wall", 0) for stats in log.train.values())
    result = Result(log, seconds, score(recipe, generate(recipe, folder, cpu)))
    note = {
        "variant": variant.name,
        "seed": recipe.seed,
        "updates": recipe.updates,
        "train_seconds": seconds,
        "test": str(result.score),
    }
    (folder / "result.json").write_text(json.dumps(note, indent=1) + "\n")
    return result
