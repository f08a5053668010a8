"""Print the path of the fairseq plugin: ``fairseq-train --user-dir "$(python -m coldstart)" ...``."""

from pathlib import Path


def plugin_path() -> Path:
    """The directory to give to fairseq's ``--user-dir``.

    fairseq puts the parent of that directory on ``sys.path``, so an installed plugin lies in a folder of its own;
    in a checkout (also one installed with ``pip install -e``) it lies beside the library.
    """
    here = Path(__file__).resolve().parent
    installed = here / "fairseq_plugin" / "user_dir"
    return installed if installed.is_dir() else here.parent / "user_dir"


if __name__ == "__main__":
    print(plugin_path())
