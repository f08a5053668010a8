"""Make Multi30k (image captions, Elliott et al., 2016) into a fairseq dataset: German to English.

    python scripts/prepare_multi30k.py [--out data-bin/multi30k] [--source DIR]

Downloads the raw sentences from their authors' public repository, or reads the same files from `--source`, and
checks them against known checksums. One sentencepiece model serves both languages.
"""

import argparse
import gzip
import hashlib
import time
import urllib.error
import urllib.request
from pathlib import Path

from console import UserError, announce, one_sentence_errors, run, whole_directory
from score_bleu import read_text
from tqdm import tqdm

URL = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw"
SHA256 = {
    "train.de.gz": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "train.en.gz": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "val.de.gz": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "val.en.gz": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "test_2016_flickr.de.gz": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
    "test_2016_flickr.en.gz": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
}
SPLITS = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
LANGUAGES = ("de", "en")
VOCABULARY_SIZE = 6000


def check(name: str, content: bytes, origin: str, expected: str) -> bytes:
    """Return `content`, or raise `UserError` where its SHA-256 is not the expected one."""
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise UserError(
            f"{name} from {origin} has the SHA-256 {found}, not {expected}: it is damaged or another version; "
            f"fetch it again from {URL}/{name} and give its folder as --source"
        )
    return content


def read_source(name: str, source: Path) -> bytes:
    """A data file from a folder, checked."""
    path = source / name
    if not path.is_file():
        raise UserError(f"{path} is missing; --source must be a folder with {', '.join(SHA256)}")
    return check(name, path.read_bytes(), str(source), SHA256[name])


def download(name: str, cache: Path, attempts: int = 4) -> bytes:
    """A data file from its authors' repository, checked; kept in `cache`, so an interrupted download goes on
    with the files that are missing. Raises `UserError` when the network does not answer."""
    cached = cache / name
    if cached.exists() and hashlib.sha256(cached.read_bytes()).hexdigest() == SHA256[name]:
        return cached.read_bytes()
    for attempt in range(1, attempts + 1):
        try:
            with urllib.request.urlopen(f"{URL}/{name}", timeout=30) as response:
                content = response.read()
            break
        except (OSError, urllib.error.URLError) as error:
            if attempt == attempts:
                raise UserError(
                    f"cannot download {URL}/{name} ({error}); try again later, or copy {', '.join(SHA256)} "
                    "into a folder and give it as --source DIR (quickstart.sh: SOURCE=DIR)"
                ) from None
            time.sleep(2**attempt)
    check(name, content, URL, SHA256[name])
    cache.mkdir(parents=True, exist_ok=True)
    partial = cached.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(cached)
    return content


def write_raw(folder: Path, files: dict[str, bytes]) -> None:
    """Unpack the files as `{train,valid,test}.{de,en}`."""
    folder.mkdir()
    for split, published in SPLITS.items():
        for language in LANGUAGES:
            packed = files[f"{published}.{language}.gz"]
            (folder / f"{split}.{language}").write_bytes(gzip.decompress(packed))


def encode(raw: Path, encoded: Path, model_prefix: Path, vocabulary_size: int) -> None:
    """Train a sentencepiece model on both sides of the training text, and encode every file with it."""
    try:
        import sentencepiece
    except ImportError:
        raise UserError("sentencepiece is not installed; run: pip install sentencepiece") from None
    sentencepiece.SentencePieceTrainer.train(
        input=[str(raw / f"train.{language}") for language in LANGUAGES],
        model_prefix=str(model_prefix),
        vocab_size=vocabulary_size,
        model_type="bpe",
        character_coverage=1.0,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=f"{model_prefix}.model")
    encoded.mkdir()
    for path in tqdm(sorted(raw.iterdir()), desc="sentencepiece", unit=" files"):
        pieces = model.encode(read_text(path), out_type=str)
        (encoded / path.name).write_text("".join(f"{' '.join(line)}\n" for line in pieces), encoding="utf-8")


def preprocess_command(encoded: Path, destination: Path) -> list[str]:
    """The `fairseq-preprocess` command for the encoded text: one dictionary for both languages."""
    return [
        "fairseq-preprocess",
        "--source-lang=de",
        "--target-lang=en",
        *[f"--{split}pref={encoded / split}" for split in SPLITS],
        "--joined-dictionary",
        f"--destdir={destination}",
    ]


def prepare(out: Path, source: Path | None = None, vocabulary_size: int = VOCABULARY_SIZE) -> None:
    """Make the dataset in `out`, or do nothing where it is there.

    Raises `UserError` for a missing or damaged file, and where the network does not answer.
    """
    if out.exists():
        print(f"{out} is ready")
        return
    files = {}
    for name in tqdm(SHA256, desc="read" if source else "download", unit=" files"):
        files[name] = read_source(name, source) if source else download(name, out.parent / f"{out.name}.raw")
    with whole_directory(out) as partial:
        write_raw(partial / "raw", files)
        encode(partial / "raw", partial / "pieces", partial / "spm", vocabulary_size)
        announce(preprocess_command(out / "pieces", out))
        run(preprocess_command(partial / "pieces", partial), partial / "preprocess.out")
    print(f"{out} is ready")


def main() -> None:
    parser = argparse.ArgumentParser(description="Multi30k as a fairseq dataset, German to English.")
    parser.add_argument("--out", type=Path, default=Path("data-bin/multi30k"), help="folder to make")
    parser.add_argument("--source", type=Path, help="folder with the published .gz files, for no download")
    parser.add_argument("--vocabulary-size", type=int, default=VOCABULARY_SIZE, help="sentencepiece pieces")
    args = parser.parse_args()
    with one_sentence_errors():
        prepare(args.out, args.source, args.vocabulary_size)


if __name__ == "__main__":
    main()
