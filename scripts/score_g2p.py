"""Word and phone error rates of a pronunciation model.

    python scripts/score_g2p.py data-bin/cmudict/text/test.references.tsv runs/g2p/generate-test.txt

A word is right when the model gives any of its listed pronunciations. The phone error rate takes, for each
word, the listed pronunciation that is nearest to the model's: insertions, deletions and substitutions of all
words, divided by the phones of those pronunciations. A reference file has one word a line, in the order of
the test set: the word and its pronunciations, separated by tabs.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from console import one_sentence_errors, readable
from generated import read_generated

Phones = Sequence[str]


@dataclass(frozen=True)
class G2pScore:
    """Counts over a test set, from which the two rates follow."""

    words: int
    wrong_words: int
    phones: int
    phone_errors: int

    @property
    def word_error_rate(self) -> float:
        """Share of words that match no listed pronunciation, in percent."""
        return 100 * self.wrong_words / self.words

    @property
    def phone_error_rate(self) -> float:
        """Edit operations per phone of the nearest listed pronunciation, in percent."""
        return 100 * self.phone_errors / self.phones

    @property
    def value(self) -> float:
        """The figure for tables: the phone error rate."""
        return self.phone_error_rate

    def __str__(self) -> str:
        return (
            f"phone error rate {self.phone_error_rate:.2f} %, "
            f"word error rate {self.word_error_rate:.2f} % ({self.words} words)"
        )


def edit_distance(hypothesis: Phones, reference: Phones) -> int:
    """Levenshtein distance: the fewest insertions, deletions and substitutions from one to the other."""
    row = list(range(len(reference) + 1))
    for i, said in enumerate(hypothesis, start=1):
        diagonal, row[0] = row[0], i
        for j, listed in enumerate(reference, start=1):
            substituted = diagonal + (said != listed)
            diagonal = row[j]
            row[j] = min(substituted, row[j] + 1, row[j - 1] + 1)
    return row[-1]


def nearest(hypothesis: Phones, references: Iterable[Phones]) -> tuple[int, int]:
    """Edit distance to the nearest listed pronunciation, and its length (the first listed one of several)."""
    candidates = [(edit_distance(hypothesis, reference), len(reference)) for reference in references]
    return min(candidates, key=lambda candidate: candidate[0])


def score(hypotheses: Sequence[Phones], references: Sequence[Sequence[Phones]]) -> G2pScore:
    """Score one hypothesis per word against all its listed pronunciations."""
    pairs = [nearest(*pair) for pair in zip(hypotheses, references, strict=True)]
    return G2pScore(
        words=len(pairs),
        wrong_words=sum(errors > 0 for errors, _ in pairs),
        phones=sum(length for _, length in pairs),
        phone_errors=sum(errors for errors, _ in pairs),
    )


def read_references(path: Path) -> list[list[list[str]]]:
    """The pronunciations of each word, from `word<TAB>P R AH N<TAB>...` lines."""
    lines = path.read_text().splitlines()
    return [[spoken.split() for spoken in line.split("\t")[1:]] for line in lines]


def score_files(references: Path, generated: Path) -> G2pScore:
    """Score a file with the output of `fairseq-generate` for the words in `references`."""
    listed = read_references(references)
    return score([text.split() for text in read_generated(generated, len(listed), references)], listed)


def main() -> None:
    parser = argparse.ArgumentParser(description="Word and phone error rates of a pronunciation model.")
    parser.add_argument("references", type=readable, help="word and pronunciations, separated by tabs")
    parser.add_argument("generated", type=readable, help="fairseq-generate's output")
    args = parser.parse_args()
    with one_sentence_errors():
        print(score_files(args.references, args.generated))


if __name__ == "__main__":
    main()
