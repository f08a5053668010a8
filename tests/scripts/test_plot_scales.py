"""The picture of a file of scales, made as a person makes it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coldstart.scales import Scales

SCRIPT = Path(__file__).parents[2] / "scripts" / "plot_scales.py"


def plot_scales(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def file(tmp_path):
    scales = {"layers.0.fc1.weight": 0.5, "layers.1.fc1.weight": 0.7, "embed.weight": 1.2}
    Scales(scales, dict.fromkeys(scales, (4, 4))).save(tmp_path / "scales.json")
    return tmp_path / "scales.json"


def test_the_picture_is_beside_the_file_unless_told_otherwise(file, tmp_path):
    pytest.importorskip("matplotlib")
    done = plot_scales(file)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"wrote {tmp_path / 'scales.png'}\n"
    assert plot_scales(file, "--out", tmp_path / "new" / "other.png").returncode == 0
    for picture in (tmp_path / "scales.png", tmp_path / "new" / "other.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_damaged_file_is_one_sentence(file, tmp_path):
    file.write_text(file.read_text()[:100])
    done = plot_scales(file)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: the scales in {file} cannot be used: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "scales.png").exists()


def test_a_missing_file_is_named(tmp_path):
    done = plot_scales(tmp_path / "nothing.json")
    assert done.returncode == 2
    assert f"there is no file {tmp_path / 'nothing.json'}" in done.stderr


def test_the_scales_are_never_overwritten(file):
    before = file.read_bytes()
    done = plot_scales(file, "--out", file)
    assert (done.returncode, file.read_bytes()) == (1, before)
    assert "would overwrite" in done.stderr
