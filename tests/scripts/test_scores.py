"""Scores against cases counted by hand, and the output of fairseq-generate that they are read from."""

import pytest
import score_bleu
import score_g2p
from console import UserError
from generated import read_hypotheses


@pytest.mark.parametrize(
    ("hypothesis", "reference", "distance"),
    [
        ("K AE T", "K AE T", 0),
        ("K AE T", "K AH T", 1),
        ("K AE T S", "K AE T", 1),
        ("AE T", "K AE T", 1),
        ("", "K AE T", 3),
        ("T AE K", "K AE T", 2),
        ("S IH T IH NG", "K IH T AH N", 3),
    ],
)
def test_edit_distance(hypothesis, reference, distance):
    assert score_g2p.edit_distance(hypothesis.split(), reference.split()) == distance
    assert score_g2p.edit_distance(reference.split(), hypothesis.split()) == distance


def test_the_nearest_pronunciation_counts_with_its_own_length():
    references = [["T", "AH", "M", "EY", "T", "OW"], ["T", "M", "AA", "T", "OW"]]
    assert score_g2p.nearest(["T", "M", "AA", "T", "AH"], references) == (1, 5)
    # as near to both: the first listed one
    assert score_g2p.nearest(["T", "AH", "M", "AA", "T", "OW"], references) == (1, 6)


def test_rates():
    hypotheses = [["K", "AE", "T"], ["D", "AO", "G"], ["R", "EH", "D"]]
    references = [[["K", "AE", "T"]], [["D", "AO", "G", "Z"]], [["R", "IY", "D"], ["R", "EH", "D"]]]
    score = score_g2p.score(hypotheses, references)
    assert score == score_g2p.G2pScore(words=3, wrong_words=1, phones=10, phone_errors=1)
    assert score.word_error_rate == pytest.approx(100 / 3)
    assert score.phone_error_rate == pytest.approx(10)
    assert str(score) == "phone error rate 10.00 %, word error rate 33.33 % (3 words)"


GENERATED = """\
S-1\td o g
T-1\tD AO G
H-1\t-0.2\tD AO G
D-1\t-0.2\tD AO G
P-1\t-0.1 -0.2
S-0\tc a t
H-0\t-0.1\tK AE T
H-0\t-0.9\tK AA T
D-0\t-0.1\tcat, detokenised
Generate test with beam=5: BLEU4 = 1.00
"""


def test_hypotheses_are_the_best_ones_in_the_order_of_the_test_set():
    assert read_hypotheses(GENERATED.splitlines()) == ["K AE T", "D AO G"]
    assert read_hypotheses(GENERATED.splitlines(), "D") == ["cat, detokenised", "D AO G"]


def test_an_empty_hypothesis_is_one():
    assert read_hypotheses(["H-0\t-1.5\t"]) == [""]


@pytest.mark.parametrize("lines", [[], GENERATED.splitlines()[:4]])
def test_output_that_is_cut_short_is_refused(lines):
    with pytest.raises(UserError, match="incomplete"):
        read_hypotheses(lines)


def test_files_are_scored_and_the_wrong_split_is_refused(tmp_path):
    (tmp_path / "generated.txt").write_text(GENERATED)
    references = tmp_path / "references.tsv"
    references.write_text("cat\tK AA T\tK AE T\ndog\tD AA G\n")
    score = score_g2p.score_files(references, tmp_path / "generated.txt")
    assert (score.wrong_words, score.phone_errors, score.phones) == (1, 1, 6)
    references.write_text("cat\tK AE T\n")
    with pytest.raises(UserError, match=r"2 hypotheses and .*references\.tsv 1 lines"):
        score_g2p.score_files(references, tmp_path / "generated.txt")


def test_bleu_is_sacrebleus_on_raw_text(tmp_path):
    sacrebleu = pytest.importorskip("sacrebleu")
    hypotheses = ["A dog runs across the meadow.", "Two men\u2028are talking."]
    references = ["A dog is running across the meadow.", "Two men\u2028are talking to each other."]
    generated = "".join(f"D-{index}\t-1\t{text}\n" for index, text in enumerate(hypotheses))
    (tmp_path / "generated.txt").write_text(generated, encoding="utf-8")
    (tmp_path / "test.en").write_text("\n".join(references) + "\n", encoding="utf-8")
    score = score_bleu.score_files(tmp_path / "test.en", tmp_path / "generated.txt")
    assert score.bleu == sacrebleu.corpus_bleu(hypotheses, [references]).score
    assert "case:mixed" in score.signature
    assert "tok:13a" in score.signature
