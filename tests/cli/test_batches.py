"""No sentence of a data set is left out, whatever its size."""

import pytest


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
