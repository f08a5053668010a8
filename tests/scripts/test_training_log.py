"""fairseq's JSON logs, and the pictures made from them."""

import plot_curves
import pytest
from console import UserError
from training_log import parse_line, parse_log

LOG = """\
{'_name': None, 'common': {'_name': None}}
2026-01-01 10:00:00 | INFO | train_inner | {"loss": "5.5", "nll_loss": "5.2", "num_updates": "10", "lr": "0.001"}
{"epoch": 1, "loss": "4.5", "nll_loss": "4.0", "num_updates": "20", "lr": "0.001", "gnorm": "inf"}
{"epoch": 1, "loss": "4.5", "nll_loss": "4.0", "num_updates": "20", "lr": "0.001", "gnorm": "inf"}
{"epoch": 1, "valid_loss": "4.4", "valid_nll_loss": "3.9", "valid_num_updates": "20", "valid_best_loss": "4.4"}
{"epoch": 1, "train_loss": "5.0", "train_nll_loss": "4.6", "train_num_updates": "20"}
{"epoch": 1, "loss": "4.4", "nll_loss": "3.95", "num_updates": "20", "lr": "0.001"}
{"epoch": 2, "loss": "3.5", "nll_loss": "3.0", "num_upd
"""


def test_curves_are_read_whatever_else_is_in_the_log():
    log = parse_log(LOG.splitlines())
    assert log.losses("train") == ([10, 20], [5.2, 3.95])
    assert log.losses("valid") == ([20], [3.9])
    assert log.curve("train", "lr") == ([10, 20], [0.001, 0.001])


def test_without_label_smoothing_the_loss_itself_is_the_curve():
    log = parse_log(['{"loss": "2.5", "num_updates": "1"}'])
    assert log.losses("train") == ([1], [2.5])


@pytest.mark.parametrize("line", ["", "no statistics", '{"broken', '{"done": true}', "{'_name': None}"])
def test_other_lines_are_passed_over(line):
    assert parse_line(line) is None


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    log = parse_log(LOG.splitlines())
    plot_curves.plot({"one": log, "two": log}, tmp_path / "new" / "curves.png", log_scale=True)
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_log_without_losses_says_how_to_get_one(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match="--log-format json --log-file"):
        plot_curves.plot({"empty": parse_log([])}, tmp_path / "curves.png")


def test_labels_are_folders_unless_given(tmp_path):
    paths = [tmp_path / "cold" / "log.jsonl", tmp_path / "warm" / "log.jsonl"]
    assert plot_curves.labels_of(paths, None) == ["cold", "warm"]
    assert plot_curves.labels_of(paths, ["a", "b"]) == ["a", "b"]
    with pytest.raises(UserError, match="1 labels for 2 logs"):
        plot_curves.labels_of(paths, ["a"])
