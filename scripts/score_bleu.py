"""BLEU of a translation model, cased and detokenised, with sacreBLEU's signature.

    python scripts/score_bleu.py data-bin/multi30k/raw/test.en runs/multi30k/generate-test.txt

The reference is the raw text, so the score does not depend on how the model's text was cut into pieces;
`fairseq-generate` must have been told how to undo that (`--bpe sentencepiece ...`).
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from console import UserError, one_sentence_errors, readable
from generated import read_generated


@dataclass(frozen=True)
class BleuScore:
    """A score between 0 and 100 and how it was computed."""

    bleu: float
    signature: str

    @property
    def value(self) -> float:
        """The figure for tables: BLEU."""
        return self.bleu

    def __str__(self) -> str:
        return f"BLEU {self.bleu:.2f} ({self.signature})"


def read_text(path: Path) -> list[str]:
    """The lines of a text file; only a line feed ends a line, whatever else Unicode takes for one."""
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def score_files(reference: Path, generated: Path) -> BleuScore:
    """Score a file with the output of `fairseq-generate` against the raw reference."""
    try:
        from sacrebleu.metrics import BLEU
    except ImportError:
        raise UserError("sacrebleu is not installed; run: pip install 'coldstart[fairseq]'") from None
    references = read_text(reference)
    metric = BLEU()
    score = metric.corpus_score(read_generated(generated, len(references), reference, "D"), [references])
    return BleuScore(score.score, str(metric.get_signature()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Cased, detokenised BLEU with its signature.")
    parser.add_argument("reference", type=readable, help="raw text, a sentence a line")
    parser.add_argument("generated", type=readable, help="fairseq-generate's output")
    args = parser.parse_args()
    with one_sentence_errors():
        print(score_files(args.reference, args.generated))


if __name__ == "__main__":
    main()
