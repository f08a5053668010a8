"""How long text takes to become fairseq's binary files: our task's way against fairseq-preprocess.

    python scripts/benchmark_binarise.py [--text data/brown] [--copies 10] [--workers 1 2] [--rounds 3]

Both are whole processes, start and imports included, in turn, on the same training text (repeated `--copies` times)
with the same number of workers; the files are the same to the byte, which is checked. Ratios are medians over rounds.
"""

import argparse
import filecmp
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from console import UserError, check_exit, executable, one_sentence_errors, shown
from provenance import markdown_table, provenance
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
OURS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from user_dir import corpus
files = corpus.find_text(Path(sys.argv[2]))
print(corpus.binarised(files, corpus.Settings("word"), Path(sys.argv[3]), int(sys.argv[4])))
"""


def seconds(command: list[str], log: Path) -> float:
    """How long a command takes; its output goes to `log`."""
    start = time.perf_counter()
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    check_exit(command, code, log)
    return time.perf_counter() - start


def compare(text: Path, folder: Path, workers: int) -> tuple[float, float]:
    """Seconds of fairseq-preprocess and of ours for one text."""
    stock, cache, log = folder / "stock", folder / "cache", folder / "log"
    for made in (stock, cache):
        shutil.rmtree(made, ignore_errors=True)
    files = [f"--{split}pref={text / f'{split}.txt'}" for split in ("train", "valid")]
    theirs = [executable("fairseq-preprocess"), "--only-source", *files, f"--destdir={stock}", f"--workers={workers}"]
    ours = [sys.executable, "-c", OURS, str(ROOT), str(text), str(cache), str(workers)]
    times = seconds(theirs, log), seconds(ours, log)
    (made,) = cache.glob("word-*")
    for name in ("dict.txt", "train.bin", "train.idx"):
        if not filecmp.cmp(stock / name, made / name, shallow=False):
            raise UserError(f"{name} differs between fairseq-preprocess and ours")
    return times


def benchmark(source: Path, copies: int, workers: list[int], rounds: int) -> str:
    """The table."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        text = folder / "text"
        text.mkdir()
        (text / "train.txt").write_text((source / "train.txt").read_text(encoding="utf-8") * copies, encoding="utf-8")
        shutil.copy(source / "valid.txt", text)
        size = (text / "train.txt").stat().st_size / 1e6
        for number in tqdm(workers, unit=" settings"):
            times = [compare(text, folder, number) for _ in range(rounds)]
            theirs, ours = (statistics.median(column) for column in zip(*times, strict=True))
            ratio = statistics.median(mine / stock for stock, mine in times)
            rows.append([f"{size:.0f} MB, {number} workers", f"{theirs:.1f}", f"{ours:.1f}", f"{ratio:.2f}"])
    return markdown_table(["text", "fairseq-preprocess, s", "ours, s", "ratio"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Binarising text, against fairseq-preprocess.")
    parser.add_argument("--text", type=Path, default=Path("data/brown"), help="folder with train.txt and valid.txt")
    parser.add_argument("--copies", type=int, default=10, help="of the training text, one behind the other")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with one_sentence_errors():
        if not (args.text / "train.txt").is_file():
            raise UserError(f"{args.text} has no train.txt; run: python scripts/prepare_brown.py --out {args.text}")
        print(benchmark(args.text, args.copies, args.workers, args.rounds))
        command = shown(["python", "scripts/benchmark_binarise.py", *sys.argv[1:]])
        print(provenance(command, f"{args.text}, {args.copies} times"))


if __name__ == "__main__":
    main()
