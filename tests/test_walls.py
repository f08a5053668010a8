"""The walls of the house: the library knows no fairseq, and the plugin is found after any kind of installation."""

import ast
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("path", sorted((ROOT / "coldstart").glob("**/*.py")), ids=lambda path: path.name)
def test_library_never_imports_fairseq(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "fairseq" for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] != "fairseq"


def test_ordinary_install_ships_the_plugin_in_a_folder_of_its_own(tmp_path):
    source = tmp_path / "source"
    for package in ("coldstart", "user_dir"):
        shutil.copytree(ROOT / package, source / package)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    venv.create(tmp_path / "venv", with_pip=False)
    site = next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", site, source],
        check=True,
    )
    # Only torch is lent to the fresh environment: the installed library must not lean on the checkout.
    command = [tmp_path / "venv" / "bin" / "python", "-m", "coldstart"]
    printed = subprocess.run(
        command, check=True, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": _torch_path()}
    ).stdout.strip()
    plugin = Path(printed)
    assert plugin.is_relative_to(site)
    assert (plugin / "compat.py").exists()
    assert (plugin / "models" / "transformer_tfixup.py").exists()
    assert (plugin / "tasks" / "gradinit.py").exists()
    assert (plugin / "optim" / "inverse_sqrt_nowarmup.py").exists()
    assert [path.name for path in plugin.parent.iterdir() if path.name != "__pycache__"] == ["user_dir"]

    fairseq_train = Path(sys.executable).with_name("fairseq-train")
    refused = subprocess.run(
        [fairseq_train, "data", "--user-dir", plugin, "--arch", "unknown"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(site)},
    )
    assert "transformer_tfixup_200l" in refused.stderr, "not among the architectures to choose from"


def _torch_path() -> str:
    import torch

    return str(Path(torch.__file__).parent.parent)
