"""Translate a test set and score the translations: sacreBLEU, chrF, tokenised BLEU, significance.

    python scripts/evaluate.py data-bin/multi30k --path runs/multi30k/checkpoints/checkpoint_best.pt \\
        --references data-bin/multi30k/raw/test.en --out runs/multi30k/evaluation \\
        --beam 5 --bpe sentencepiece --sentencepiece-model data-bin/multi30k/spm.model

Options that it does not know go to `fairseq-generate`. The folder `--out` gets, in the order of the test set,
`hypotheses.txt`, detokenised, and, where there are tokenised references, `hypotheses.tok.txt`, the words of the model;
`scores.json`; and fairseq's output. The same command translates once, and again if a checkpoint or the data change.
"""

import argparse
import hashlib
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from console import UserError, announce, check_exit, executable, one_sentence_errors, readable
from generated import read_generated
from recipes import EVERY_SENTENCE, device
from score_bleu import read_text
from tqdm import tqdm
from training_run import claim, cuda_is_available, end, environment, exit_on_sigterm, locked

from coldstart.__main__ import plugin_path

SIGNIFICANT = 0.05
PIECES = {"subword_nmt": "@@", "sentencepiece": "▁"}  # how pieces are marked, by what fairseq calls them


@dataclass(frozen=True)
class Split:
    """A binarised data set: its folder, its name, its languages and how many sentences it has."""

    data: Path
    subset: str
    source: str
    target: str
    sentences: int


@dataclass(frozen=True)
class Score:
    """A score between 0 and 100, and sacreBLEU's account of how it was computed."""

    name: str
    score: float
    signature: str

    def __str__(self) -> str:
        return f"{self.name} {self.score:.2f} ({self.signature})"


@dataclass(frozen=True)
class Comparison:
    """A score of ours and that of a second system, and how probable so large a difference would be by chance."""

    name: str
    score: float
    other: float
    p_value: float
    signature: str

    def __str__(self) -> str:
        verdict = "significant" if self.p_value < SIGNIFICANT else "not significant"
        scores = f"{self.score:.2f} against {self.other:.2f}, {self.score - self.other:+.2f}"
        return f"{self.name} {scores}: {verdict} at {SIGNIFICANT} (p = {self.p_value:.4f}; {self.signature})"


def find_split(data: Path, subset: str, source: str | None, target: str | None) -> Split:
    """The test set of that name, of the languages that are given, or of the only pair that the folder has.

    Raises `UserError` where there is none, or more than one.
    """
    from fairseq.data import indexed_dataset

    pairs = []
    for path in sorted(data.glob(f"{subset}.*-*.*.idx")):
        pair, side = path.name.removeprefix(f"{subset}.").removesuffix(".idx").rsplit(".", 1)
        first, _, second = pair.partition("-")
        if side == first and source in (None, first) and target in (None, second):
            pairs.append((first, second, path.with_suffix("")))
    if len(pairs) != 1:
        found = ", ".join(f"{first}-{second}" for first, second, _ in pairs) or "none"
        raise UserError(
            f"{data} has {len(pairs)} data sets {subset}.SOURCE-TARGET that fit ({found}); expected one: "
            "see DATA-BIN, --gen-subset, --source-lang and --target-lang"
        )
    source, target, prefix = pairs[0]
    implementation = indexed_dataset.infer_dataset_impl(str(prefix))
    return Split(data, subset, source, target, len(indexed_dataset.make_dataset(str(prefix), implementation)))


def check_pieces(split: Split, options: Sequence[str]) -> None:
    """Raise `UserError` where the model's tokens are pieces of words and no option says how to join them."""
    if any(re.match("--(bpe|remove-bpe|post-process)(=|$)", option) for option in options):
        return
    dictionary = split.data / f"dict.{split.target}.txt"
    if not dictionary.is_file():
        raise UserError(f"{dictionary} is missing; {split.data} must be a folder that fairseq-preprocess made")
    words = [line.split(" ")[0] for line in read_text(dictionary)]
    for name, mark in PIECES.items():
        if sum(mark in word for word in words) > len(words) / 10:
            raise UserError(f"{split.data} has pieces of words ({mark}); add --post-process={name}, which joins them")


def check_lengths(texts: dict[Path, list[str]], split: Split) -> None:
    """Raise `UserError` unless each text has as many lines as the test set has sentences."""
    for path, lines in texts.items():
        if len(lines) != split.sentences:
            raise UserError(
                f"{path} has {len(lines)} lines, and {split.subset} in {split.data} {split.sentences} sentences; "
                "give the text of the same sentences, one a line"
            )


def digests(paths: Sequence[Path]) -> dict[str, str]:
    """SHA-256 of each file."""
    found = {}
    for path in paths:
        with path.open("rb") as file:
            found[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def generate_command(split: Split, checkpoints: Sequence[Path], out: Path, options: Sequence[str]) -> list[str]:
    """The `fairseq-generate` command; its translations go to `{out}/generate-{subset}.txt`."""
    return [
        *("fairseq-generate", str(split.data), f"--user-dir={plugin_path()}", f"--gen-subset={split.subset}"),
        *(f"--source-lang={split.source}", f"--target-lang={split.target}"),  # detokenisers need them told
        *(f"--path={':'.join(map(str, checkpoints))}", f"--results-path={out}"),
        *(*device(not cuda_is_available()), "--max-tokens=4096", *options, *EVERY_SENTENCE),
    ]


def generate(command: Sequence[str], out: Path, split: Split, lock: IO[str]) -> None:
    """Run `fairseq-generate` with a progress bar over the sentences. Raises `UserError` where it fails."""
    generated = out / f"generate-{split.subset}.txt"
    generated.unlink(missing_ok=True)
    with (out / "generate.out").open("w") as output:
        process = subprocess.Popen(
            [executable(command[0]), *command[1:]],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            pass_fds=[lock.fileno()],
        )
    try:
        pace = 0.5 if sys.stderr.isatty() else 30  # seconds between two pictures of the bar
        with tqdm(total=split.sentences, desc="translate", unit=" sentences", mininterval=pace) as bar:
            position, running = 0, True
            while running:
                running = process.poll() is None
                if generated.exists():
                    with generated.open("rb") as file:
                        file.seek(position)
                        lines = file.readlines()
                    position += sum(map(len, lines))
                    bar.update(sum(line.startswith(b"S-") for line in lines))
                if running:
                    time.sleep(0.5)
    finally:
        end(process)
    check_exit(command, process.returncode, out / "generate.out")


def translate(split: Split, checkpoints: Sequence[Path], out: Path, options: Sequence[str], lock: IO[str]) -> None:
    """Have `{out}/generate-{subset}.txt` made by `fairseq-generate`, unless it was, from the same files."""
    command = generate_command(split, checkpoints, out, options)
    claim(out, command)
    announce(command)
    data = sorted([*split.data.glob(f"{split.subset}.{split.source}-{split.target}.*"), *split.data.glob("dict.*.txt")])
    note, made_from = out / "generated.json", digests([*checkpoints, *data])
    if note.exists():
        if json.loads(note.read_text()) == made_from:
            return
        print("a checkpoint or the data have changed: translating again")
        note.unlink()
    generate(command, out, split, lock)
    read_generated(out / f"generate-{split.subset}.txt", split.sentences, split.data)
    partial = note.with_suffix(".partial")
    partial.write_text(json.dumps(made_from, indent=1) + "\n")
    partial.replace(note)


def join_pieces(lines: list[str], bpe: str | None) -> list[str]:
    """Words from the pieces of `--bpe`, as fairseq joins them; without `--bpe`, words they are."""
    from fairseq.data.data_utils import post_process

    return [post_process(line, bpe) for line in lines]


def split_compounds(line: str) -> str:
    """Hyphens between words set apart, as tensor2tensor's get_ende_bleu.sh and fairseq's compound_split_bleu.sh do.

    They see bytes: the two letters around a hyphen are used up, but only a part of one that has several bytes.
    """
    return re.sub(rb"(\S)-(\S)", rb"\1 ##AT##-##AT## \2", line.encode()).decode()


def score(name: str, metric: Any, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """Score with one of sacreBLEU's metrics."""
    found = metric.corpus_score(hypotheses, [references]).score
    return Score(name, found, str(metric.get_signature()))


def detokenised_metrics(lowercase: bool) -> dict[str, Any]:
    """sacreBLEU's BLEU, which cuts words by the rules of mteval-v13a, and chrF."""
    from sacrebleu.metrics import BLEU, CHRF

    return {"BLEU": BLEU(lowercase=lowercase), "chrF": CHRF(lowercase=lowercase)}


def score_tokenised(hypotheses: list[str], references: list[str], compounds: bool, lowercase: bool) -> list[Score]:
    """BLEU of words as they are, and with compounds split where asked for; to compare with papers that report it."""
    from sacrebleu.metrics import BLEU

    metric = BLEU(lowercase=lowercase, tokenize="none", force=True)
    scores = [score("tokenised BLEU", metric, hypotheses, references)]
    if compounds:
        apart = [[split_compounds(line) for line in lines] for lines in (hypotheses, references)]
        scores.append(score("tokenised BLEU, compounds split", metric, *apart))
    return scores


def compare(
    hypotheses: list[str], other: list[str], references: list[str], metrics: dict[str, Any]
) -> list[Comparison]:
    """sacreBLEU's paired bootstrap test of two systems; the signature has its samples and its seed."""
    from sacrebleu.significance import PairedTest

    systems = [("other", other), ("ours", hypotheses)]
    signatures, results = PairedTest(systems, metrics, [references], test_type="bs")()
    compared = []
    for name, sacrebleus in zip(metrics, signatures, strict=True):
        baseline, ours = results[sacrebleus]
        # sacreBLEU counts the samples with a larger difference than this one: of equal scores none, which is no proof.
        p_value = ours.p_value if ours.score != baseline.score else 1.0
        compared.append(Comparison(name, ours.score, baseline.score, p_value, str(signatures[sacrebleus])))
    return compared


def write_text(path: Path, lines: Sequence[str]) -> None:
    """Write lines, each ended by a line feed."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")


def evaluate(args: argparse.Namespace, options: Sequence[str]) -> None:
    """Translate, score, print the scores and keep them; `options` are for `fairseq-generate`."""
    for library in ("fairseq", "sacrebleu"):  # importing fairseq makes all libraries say what they do
        logging.getLogger(library).setLevel(logging.WARNING)
    try:
        metrics = detokenised_metrics(args.lowercase)
    except ImportError:
        raise UserError("sacrebleu is not installed; run: pip install 'coldstart[fairseq]'") from None
    split = find_split(args.data, args.gen_subset, args.source_lang, args.target_lang)
    texts = {path: read_text(path) for path in (args.references, args.tokenized_references, args.against) if path}
    check_lengths(texts, split)
    check_pieces(split, options)
    with locked(args.out) as lock:
        translate(split, args.path, args.out, options, lock)
        generated = args.out / f"generate-{split.subset}.txt"
        hypotheses = read_generated(generated, split.sentences, args.references, "D")
        write_text(args.out / "hypotheses.txt", hypotheses)
        scores = [score(name, metric, hypotheses, texts[args.references]) for name, metric in metrics.items()]
        if args.tokenized_references:
            words = join_pieces(read_generated(generated, split.sentences, args.tokenized_references, "H"), args.bpe)
            write_text(args.out / "hypotheses.tok.txt", words)
            scores += score_tokenised(words, texts[args.tokenized_references], args.compound_split, args.lowercase)
        compared = []
        if args.against:
            compared = compare(hypotheses, texts[args.against], texts[args.references], metrics)
        note = {
            "checkpoints": [str(path) for path in args.path],
            "references": str(args.references),
            "sentences": split.sentences,
            "scores": [asdict(each) for each in scores],
            "against": str(args.against) if args.against else None,
            "comparisons": [asdict(each) for each in compared],
        }
        (args.out / "scores.json").write_text(json.dumps(note, indent=1) + "\n")
    for line in (*scores, *compared):
        print(line)


def checkpoints(text: str) -> list[Path]:
    """`A.pt:B.pt` as files, for argparse."""
    return [readable(name) for name in text.split(":")]


def folder(name: str) -> Path:
    """An argument that must name a folder, for argparse."""
    path = Path(name)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {name}; DATA-BIN comes before other options")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Translate a test set and score the translations. Other options are fairseq-generate's.",
        allow_abbrev=False,
    )
    parser.add_argument("data", type=folder, metavar="DATA-BIN", help="what fairseq-preprocess made")
    parser.add_argument("--path", required=True, type=checkpoints, metavar="A.pt[:B.pt]", help="model, or ensemble")
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument(
        "--references", required=True, type=readable, metavar="FILE", help="raw text, a sentence a line"
    )
    parser.add_argument(
        "--tokenized-references", type=readable, metavar="FILE", help="also BLEU of words against these"
    )
    parser.add_argument("--compound-split", action="store_true", help="tokenised BLEU also with compounds split")
    parser.add_argument("--against", type=readable, metavar="FILE", help="another system's hypotheses.txt, to compare")
    parser.add_argument("--lowercase", action="store_true", help="ignore case in all scores")
    parser.add_argument("--gen-subset", default="test", help="the split to translate; default: test")
    parser.add_argument("--source-lang", "-s", metavar="LANGUAGE", help="if DATA-BIN has several pairs")
    parser.add_argument("--target-lang", "-t", metavar="LANGUAGE", help="if DATA-BIN has several pairs")
    parser.add_argument("--bpe", help="fairseq-generate's: how to join pieces of words")
    args, options = parser.parse_known_args()
    if args.tokenized_references and args.bpe not in (None, *PIECES):
        parser.error(
            f"words cannot be told in --bpe={args.bpe}: leave out --tokenized-references, or give --post-process"
        )
    if args.compound_split and not args.tokenized_references:
        parser.error("--compound-split is of tokenised BLEU, which needs --tokenized-references FILE")
    if args.bpe:
        options = [f"--bpe={args.bpe}", *options]
    exit_on_sigterm()
    with one_sentence_errors():
        evaluate(args, options)


if __name__ == "__main__":
    main()
