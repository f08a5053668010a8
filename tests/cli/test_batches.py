"""No sentence of a data set is left out, whatever its size."""

from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[2] / "user_dir"


@pytest.mark.parametrize("sentences", [5, 20])
def test_every_sentence_is_translated(trained, plugin_options, run, tmp_path, reversal_data, sentences):
    """fairseq keeps 16 of 20 sentences, and of 5 none."""
    for language in ("src", "tgt"):
        (tmp_path / f"test.{language}").write_text("a b c\n" * sentences)
    dictionaries = [
        f"--{name}dict={reversal_data}/dict.{language}.txt" for name, language in (("src", "src"), ("tgt", "tgt"))
    ]
    run(
        *("fairseq-preprocess", "--source-lang", "src", "--target-lang", "tgt", *dictionaries),
        *("--testpref", tmp_path / "test", "--destdir", tmp_path / "binary"),
    )
    output = run("fairseq-generate", tmp_path / "binary", *plugin_options(trained)[1:])
    assert f"Translated {sentences:,} sentences" in output


def test_a_run_that_ends_in_mid_epoch_ends_well(run):
    """The thread that prepares batches aborts the process if Python exits under it."""
    run("python", Path(__file__).with_name("prefetching.py"), PLUGIN)
