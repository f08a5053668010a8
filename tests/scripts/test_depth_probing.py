"""The study of depth before training: real models of fairseq in small, what is kept, tables whose numbers are known."""

import csv
import math
import sys
from dataclasses import replace
from pathlib import Path

import depth_probing
import depth_starts
import depth_study
import pytest
import torch
from depth_probing import Point, probe_point, with_random_tokens
from depth_starts import ADMIN, GRADINIT, T_FIXUP, Depth, Size
from recipes import POST_LN

from coldstart.blocks import find_stacks, weighted_residuals
from coldstart.probe import BlockProbe, DepthProbe

ROOT = Path(__file__).parents[2]
FEW_ITERATIONS = replace(GRADINIT, options=(*GRADINIT.options, "--gradinit-iterations=4", "--gradinit-lr=0.05"))
STEP = {"optimizer": "adam", "lr": 1e-3}


@pytest.fixture(autouse=True)
def small_data(reversal_data, plugin, monkeypatch):
    """The study is of the small data set, and runs in the root of the repository."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(depth_starts.DATA, "cmudict", replace(depth_starts.DATA["cmudict"], data=reversal_data))
    monkeypatch.setattr(depth_probing, "prepare", lambda recipe: None)


@pytest.fixture
def study(tmp_path, monkeypatch):
    """``study(*options)``: what the command prints."""

    def run_study(*options: str) -> str:
        size = ("--width=16", "--max-tokens=128", f"--out={tmp_path}")
        monkeypatch.setattr(sys, "argv", ["depth_study.py", "probe", *size, *options])
        args = depth_study.parse_args()
        return args.run(args)

    return run_study


@pytest.fixture
def probed_model(monkeypatch):
    """``probed_model(start)``: the model as the probe gets it."""
    models = []
    probe = depth_probing.probe_depth

    def probe_and_keep(model, *args, **kwargs):
        models.append(model)
        return probe(model, *args, **kwargs)

    def model_of(start):
        probe_point(start, recipe(), **STEP)
        return models[-1]

    monkeypatch.setattr(depth_probing, "probe_depth", probe_and_keep)
    return model_of


def recipe(*extra: str):
    return Size(width=16, max_tokens=128, extra=extra).recipe(Depth(2, 2), "1e-3", 1, seed=3)


def rows_of(text: str) -> list[list[str]]:
    """The cells of all lines of the Markdown tables."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def forbid_probing(monkeypatch) -> None:
    def fail(*_):
        raise AssertionError("a point is measured")

    monkeypatch.setattr(depth_probing, "probe_point", fail)


# --- the study ---


def test_real_models_are_probed_and_finished_points_kept(study, tmp_path, monkeypatch):
    command = ("--arch=tfixup,pre_ln,admin", "--layers=3,1,2", "--seeds=1", "--name=small")
    text = study(*command)
    rows, starts = rows_of(text), ["T-Fixup", "Pre-LN", "Admin"]
    assert [row[0] for row in rows] == ["start", "---", *starts, "start", "---", *(s for s in starts for _ in range(3))]
    assert all(": N^(" in cell for row in rows[2:5] for cell in row[1:])
    assert [row[1] for row in rows[7:10]] == ["1", "2", "3"]
    assert "first update of adam, learning rate 1e-3; seeds 1" in text
    assert (tmp_path / "small.md").read_text() == text
    assert (tmp_path / "small.png").stat().st_size > 20_000
    with (tmp_path / "small.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 9
    line = next(line for line in lines if (line["start"], line["decoder_layers"]) == ("admin", "3"))
    names = ("signal_encoder", "signal_decoder", "gradient_norm", "function_change", "relative_change")
    assert rows[-1][2:7] == [f"{float(line[name]):.3g}" for name in names]
    assert rows[-1][8] == f"{float(line['kept_spread']):.3g}"
    assert rows[-1][7] == f"{float(line['updated_loss']) - float(line['loss']):.3g}"

    files = sorted(tmp_path.glob("probe/**/*.*n"))
    removed, torn = (next(tmp_path.glob(f"probe/**/{place}-*")) for place in ("1-layers/pre_ln", "3-layers/pre_ln"))
    removed.unlink()
    torn.write_text(torn.read_text()[:-20])
    measured = []

    def probe_and_note(start, recipe, *step):
        measured.append((start.name, recipe.model[0]))
        return probe_point(start, recipe, *step)

    monkeypatch.setattr(depth_probing, "probe_point", probe_and_note)
    assert study(*command) == text
    assert measured == [("pre_ln", "--encoder-layers=1"), ("pre_ln", "--encoder-layers=3")]
    forbid_probing(monkeypatch)
    assert study(*command) == text
    assert sorted(tmp_path.glob("probe/**/*.*n")) == files
    assert len(files) == 9


def test_every_setting_has_files_of_its_own(tmp_path):
    base = {"size": Size(), "lr": "1e-3", "random_tokens": False, "out": tmp_path}
    sizes = [{"data": "multi30k"}, {"width": 32}, {"max_tokens": 9}, {"optimizer": "sgd"}, {"extra": ("--fp16",)}]
    changes = [{}, *({"size": Size(**size)} for size in sizes), {"lr": "2e-3"}, {"random_tokens": True}]
    labs = [depth_probing.Laboratory(**base | change) for change in changes]
    longer = replace(GRADINIT, options=(*GRADINIT.options, "--gradinit-iterations=7"))
    places = [(T_FIXUP, Depth(2, 3), 1), (T_FIXUP, Depth(3, 2), 1), (T_FIXUP, Depth(2, 3), 2)]
    places += [(GRADINIT, Depth(2, 3), 1), (longer, Depth(2, 3), 1)]
    files = {lab.file(*place) for lab in labs for place in places}
    assert len(files) == len(labs) * len(places)
    assert all("2+3-layers" in str(lab.file(*places[0])) for lab in labs)


def test_random_data(study, tmp_path):
    command = ("--arch=tfixup", "--layers=1", "--seeds=1")
    real, drawn, again = study(*command), study(*command, "--random-data"), study(*command, "--random-data")
    assert rows_of(real)[5] != rows_of(drawn)[5]
    assert drawn == again
    assert "- data: cmudict, random tokens" in drawn
    assert len(list(tmp_path.glob("probe/**/*.json"))) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--arch=tfixup,tfixups"],
            r"tfixups: fairseq-train says: .* invalid choice: 'tfixups'; --arch takes post_ln,",
        ),
        (["--arch=transformer_lm"], "transformer_lm: fairseq-train says: unrecognized arguments: --encoder-lay"),
        (["--arch=admin", "--", "--encoder-normalize-before"], "admin: --encoder-normalize-before is Pre-LN"),
        (["--arch=tfixup", "--width=18"], "tfixup: embed_dim must be divisible by num_heads"),
    ],
)
def test_what_cannot_be_built_is_one_sentence_before_any_point(options, sentence, study, monkeypatch):
    forbid_probing(monkeypatch)
    with pytest.raises(depth_probing.UserError, match=sentence) as raised:
        study("--layers=1,2", *options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("option", ["--lr=0", "--lr=nan", "--layers=0", "--name=a/b", "--name=.", "--seeds=x"])
def test_options_that_make_no_sense(option, study, capsys):
    with pytest.raises(SystemExit):
        study("--arch=tfixup", "--layers=1", option)
    assert f"argument {option.partition('=')[0]}" in capsys.readouterr().err


# --- one point ---


def test_the_loss_is_that_of_the_first_update_of_the_training(run, log_of, tmp_path):
    probe = probe_point(FEW_ITERATIONS, recipe(), **STEP)
    output = run(*recipe().train(tmp_path, FEW_ITERATIONS), cwd=ROOT)
    assert log_of(output, "train_inner")[0]["loss"] == pytest.approx(probe.loss / math.log(2), abs=2e-3)


def test_admin_has_profiled_itself(probed_model):
    model = probed_model(ADMIN)
    weights = [
        norm.skip_weight.mean().item() for stack in find_stacks(model) for norm in weighted_residuals(model, stack)
    ]
    assert len(weights) == 10
    assert len(set(weights)) > 2


def test_gradinit_has_scaled(probed_model):
    plain = dict(probed_model(POST_LN).named_parameters())
    scaled = dict(probed_model(FEW_ITERATIONS).named_parameters())
    matrices = [name for name, weight in plain.items() if weight.dim() == 2 and "embed" not in name]
    scales = {name: (scaled[name] / plain[name]).detach() for name in matrices}
    assert all(scale.std() < 1e-4 for scale in scales.values())
    assert max(abs(scale.mean() - 1) for scale in scales.values()) > 0.05


def test_activations_that_are_checkpointed_change_nothing():
    kept, checkpointed = (probe_point(T_FIXUP, recipe(*extra), **STEP) for extra in ((), ("--checkpoint-activations",)))
    assert checkpointed == kept


def test_random_tokens_keep_special_ones_and_the_shift():
    from fairseq.data import Dictionary

    source, target = Dictionary(), Dictionary()
    for number in range(50):
        source.add_symbol(f"s{number}")
        target.add_symbol(f"t{number}")
    pad, eos = target.pad(), target.eos()
    targets = torch.tensor([[5, 6, 7, 8, eos], [9, 5, eos, pad, pad]])
    previous = torch.tensor([[eos, 5, 6, 7, 8], [eos, 9, 5, pad, pad]])
    sources = torch.tensor([[pad, pad, 6, 7, eos], [8, source.unk(), 6, 7, eos]])
    inputs = {"src_tokens": sources, "prev_output_tokens": previous, "src_lengths": torch.tensor([3, 5])}
    batch = {"target": targets, "net_input": inputs, "ntokens": 8}

    drawn = with_random_tokens(batch, source, target, seed=1)
    pairs = [(drawn["target"], targets)] + [(drawn["net_input"][name], inputs[name]) for name in inputs]
    for new, old in pairs[:3]:
        special = old < target.nspecial
        assert torch.equal(new[special], old[special])
        assert (new[~special] >= target.nspecial).all()
        assert (new[~special] != old[~special]).any()
        assert (new < len(target)).all()
    moved = drawn["net_input"]["prev_output_tokens"]
    assert torch.equal(moved[0, 1:], drawn["target"][0, :4])
    assert torch.equal(moved[1, 1:3], drawn["target"][1, :2])
    assert drawn["ntokens"] == 8
    assert torch.equal(batch["target"], targets)
    assert torch.equal(with_random_tokens(batch, source, target, seed=1)["target"], drawn["target"])
    assert not torch.equal(with_random_tokens(batch, source, target, seed=2)["target"], drawn["target"])


# --- numbers that are known ---


def made_up(signal: float = 1.0, loss: float = 1.0, updated_loss: float = 0.5, **numbers: float) -> DepthProbe:
    blocks = tuple(
        BlockProbe(stack, f"{stack}.0", "feed-forward", 1.0, 0.5, signal, 1.0, 1.0) for stack in depth_probing.STACKS
    )
    others = ("gradient_norm", "output_norm", "function_change", "output_spread", "updated_spread")
    return DepthProbe(blocks, loss, updated_loss, **dict.fromkeys(others, 1.0) | numbers)


def points(values, start=T_FIXUP) -> list[Point]:
    return [Point(start, Depth(n, n), seed, probe) for (n, seed), probe in values.items()]


def test_exponents_of_closed_form():
    probes = {
        (n, seed): made_up(
            signal=3 * n**-1.0,
            function_change=n**0.5,
            gradient_norm=2.0,
            loss=5.0,
            updated_loss=5 - 2**-8 * n,
            updated_spread=n**-0.5,
        )
        for n in (4, 16, 64)
        for seed in (1, 2)
    }
    row = rows_of(depth_probing.verdict_table(points(probes)))[2]
    assert row == [
        "T-Fixup",
        *("shrinking: N^(-1.00 ± 0.00)",) * 2,
        "flat: N^(0.00 ± 0.00)",
        *("growing: N^(0.50 ± 0.00)",) * 2,
        "growing: N^(1.00 ± 0.00)",
        "shrinking: N^(-0.50 ± 0.00)",
    ]


def test_too_few_points_have_no_exponent_but_values():
    few = points({(4, 1): made_up(), (16, 1): made_up()})
    same_depth = points({(4, seed): made_up() for seed in (1, 2, 3)}, POST_LN)
    rows = rows_of(depth_probing.verdict_table([*few, *same_depth]))
    assert [set(row[1:]) for row in rows[2:]] == [{"-"}, {"-"}]


def test_exponents_are_of_stacks_of_one_depth():
    uneven = [Point(T_FIXUP, Depth(40, 6), 1, made_up(function_change=99.0))]
    found = points({(n, 1): made_up(function_change=1 / n) for n in (2, 4, 8)}) + uneven
    assert rows_of(depth_probing.verdict_table(found))[2][4] == "shrinking: N^(-1.00 ± 0.00)"
    assert rows_of(depth_probing.value_table(found))[-1][1:6:4] == ["40+6", "99"]
    assert set(rows_of(depth_probing.verdict_table(uneven))[2][1:]) == {"-"}


def test_an_overflow_is_infinite_and_values_are_medians():
    probes = {(4, seed): made_up(function_change=value) for seed, value in enumerate((3.0, 1.0, math.nan))}
    probes |= {(8, seed): made_up(function_change=value) for seed, value in enumerate((math.inf, 1.0, math.nan))}
    rows = rows_of(depth_probing.value_table(points(probes)))
    assert [row[5] for row in rows[2:]] == ["3", "inf"]
    assert rows_of(depth_probing.verdict_table(points(probes)))[2][4] == "growing: not finite at N = 4"


def test_measurements_are_read_as_they_were_written(tmp_path):
    probe = made_up(signal=math.nan, function_change=math.inf, gradient_norm=0.1 + 0.2, updated_loss=-math.inf)
    file = tmp_path / "new" / "point.json"
    depth_probing.write_probe(probe, file)
    assert repr(depth_probing.read_probe(file)) == repr(probe)
    assert [path.name for path in file.parent.iterdir()] == ["point.json"]


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"blocks": [3]}', '{"blocks": [{}]}', b"\xff"])
def test_damaged_measurements_are_none(text, tmp_path):
    file = tmp_path / "point.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert depth_probing.read_probe(file) is None
