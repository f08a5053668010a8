"""What fairseq-eval-lm says of a model of `--task wikitext_language_modeling`, read back from its output."""

import re
from dataclasses import dataclass
from pathlib import Path

from console import UserError

REPORT = re.compile(r"word perplexity ([\d.]+|inf)(?:, ([\d.]+|inf) bits per character)?")


@dataclass(frozen=True)
class PerplexityScore:
    """Perplexity by words, whatever the model predicts; bits per character of a model of characters."""

    word_perplexity: float
    bits_per_character: float | None = None

    def __str__(self) -> str:
        if self.bits_per_character is None:
            return f"word perplexity {self.word_perplexity:.2f}"
        return f"{self.bits_per_character:.3f} bits per character, word perplexity {self.word_perplexity:.1f}"


def score_file(output: Path) -> PerplexityScore:
    """The last report in an output of fairseq-eval-lm. Raises `UserError` where there is none."""
    reports = REPORT.findall(output.read_text(errors="replace"))
    if not reports:
        raise UserError(f"{output} has no word perplexity; was fairseq-eval-lm given our task?")
    words, characters = reports[-1]
    return PerplexityScore(float(words), float(characters) if characters else None)
