"""Benchmark of the perceptron: four modes in turn, scaler parity, and its command."""

from __future__ import annotations

import json

import pytest
import torch
from simulated import CPU, HostQueue

import ampfast
from benchmarks import mlp_amp
from benchmarks.mlp_amp import Setting

SMALL = Setting(width=8, batch=4, batches=3, epochs=3)
OURS = ampfast.backends.default_for(CPU)
MODES = [("fp32", "none"), ("autocast", "none"), ("autocast", "torch"), ("autocast", OURS)]


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch):
    """Fixes the dtype, whose choice takes time and has a test of its own."""
    monkeypatch.setattr(mlp_amp, "autocast_dtype", lambda device: (torch.bfloat16, ["why"]))


def test_a_gpu_gets_the_sizes_that_are_known():
    assert Setting.usual(torch.device("cuda")) == Setting(4096, 512, 50, 3)
    assert len(Setting().case.shapes) == 6
    assert Setting().case.elements == 3 * (4096 * 4096 + 4096)
    assert Setting.usual(CPU).case.elements < Setting().case.elements


@pytest.mark.parametrize("queue", [None, HostQueue()], ids=["on a CPU", "as on a GPU"])
def test_epochs_of_four_modes_take_turns(monkeypatch, queue):
    turns = []
    plain = mlp_amp.Trainer.train

    def train(self, batches):
        turns.append((self.key, batches))
        plain(self, batches)

    monkeypatch.setattr(mlp_amp.Trainer, "train", train)
    measured = mlp_amp.measure(SMALL, CPU, queue)
    forwards = [(mode, 3) for mode in MODES]
    warm_up = [(mode, mlp_amp.WARM_UP) for mode in MODES]
    assert turns == warm_up + forwards + forwards[::-1] + forwards
    if queue is not None:
        assert queue.asked == ["synchronize"] * (2 * 4 * SMALL.epochs)

    assert [(row.path, row.provider) for row in measured.rows] == MODES
    assert [row.dtype for row in measured.rows] == ["float32", *3 * ["bfloat16"]]
    for row in measured.rows:
        assert (row.subject, row.case) == ("mlp", "3x8, batch 4")
        assert (row.tensors, row.elements) == (6, 3 * (64 + 8))
        assert (row.over_none is None) is ((row.path, row.provider) == ("autocast", "none"))
        assert row.ms_p20 <= row.ms_p50 <= row.ms_p80
    assert measured.rows[3].vs_torch is not None
    assert measured.notes[0] == "mlp: why"
    sizes = "3 layers of 8, 3 batches of 4, 3 epochs"
    assert measured.notes[1].startswith(f"mlp: {sizes} took fp32 ")
    assert len(measured.notes) == 2


def test_each_mode_is_reported_against_autocast_only(monkeypatch):
    times = dict(zip(MODES, (3.0, 2.0, 2.5, 2.1), strict=True))
    seconds = {mode: [each / 1e3] * 3 for mode, each in times.items()}
    monkeypatch.setattr(mlp_amp, "_epochs", lambda *arguments: seconds)
    measured = mlp_amp.measure(SMALL, CPU)
    assert [row.over_none for row in measured.rows] == pytest.approx([1.5, None, 1.25, 1.05])
    assert [row.ms_p50 for row in measured.rows] == pytest.approx([3.0, 2.0, 2.5, 2.1])
    assert measured.notes[1].endswith(
        "took fp32 0.01 s, autocast 0.01 s, autocast with torch 0.01 s, "
        f"autocast with {OURS} 0.01 s"
    )


def test_modes_differ_in_nothing_but_precision_and_scaler():
    data = [tuple(torch.randn(4, 8) for _ in "xy") for _ in range(3)]
    trainers = []
    for seed, (path, provider) in enumerate(MODES):
        torch.manual_seed(seed)
        dtype = None if path == "fp32" else torch.bfloat16
        trainers.append(mlp_amp.Trainer(SMALL, CPU, dtype, provider, data))
    before = [[p.clone() for p in trainer.model.parameters()] for trainer in trainers]
    for parameters in before[1:]:
        for one, other in zip(before[0], parameters, strict=True):
            assert torch.equal(one, other)
    for trainer in trainers:
        trainer.train(3)
        for parameter, first in zip(trainer.model.parameters(), before[0], strict=True):
            assert not torch.equal(parameter, first), "it does not train"
    full, half, of_torch, of_ours = ([*t.model.parameters()] for t in trainers)
    assert not torch.equal(full[0], half[0]), "autocast changes nothing"
    # A power of two as the scale changes no bit of the result.
    for one, other, third in zip(half, of_torch, of_ours, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


@pytest.mark.parametrize(("wrong_from", "when"), [(1, "before"), (6, "after")])
def test_a_scaler_that_trains_otherwise_is_not_reported(monkeypatch, wrong_from, when):
    steps = []
    plain = ampfast.GradScaler.step

    def step(self, optimizer):
        steps.append(1)
        if len(steps) >= wrong_from:
            optimizer.param_groups[0]["params"][0].grad[0] *= 1.5
        return plain(self, optimizer)

    monkeypatch.setattr(ampfast.GradScaler, "step", step)
    with pytest.raises(AssertionError, match=f"{when} it was timed"):
        mlp_amp.measure(SMALL, CPU)


def test_skipped_steps_are_reported(monkeypatch):
    plain = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *sizes, **options: 1e30 * plain(*sizes, **options))
    notes = mlp_amp.measure(SMALL, CPU).notes
    assert any("steps were skipped, the scale fell to" in note for note in notes)


def test_a_job_that_does_not_fit_is_not_begun(monkeypatch):
    monkeypatch.setattr(mlp_amp, "Trainer", lambda *arguments: pytest.fail("was built"))
    with pytest.raises(MemoryError, match="are available"):
        mlp_amp.measure(Setting(width=1 << 20), CPU)


def test_a_run_has_one_job_and_a_quick_one_no_more_epochs():
    (full,) = mlp_amp.jobs(False, CPU, None)
    (quick,) = mlp_amp.jobs(True, CPU, None)
    assert full.label == str(Setting.usual(CPU))
    assert quick.label.endswith("3 epochs")


def test_it_runs_by_itself(capsys, tmp_path):
    path = tmp_path / "mlp.json"
    sizes = ["--width", "8", "--batch", "4", "--batches", "2", "--epochs", "2"]
    assert mlp_amp.main([*sizes, "--device", "cpu", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("3 layers of 8, 2 batches of 4, 2 epochs, SGD with a learning rate")
    assert "over none" in printed
    content = json.loads(path.read_text())
    assert [row["provider"] for row in content["rows"]] == ["none", "none", "torch", OURS]
    assert content["complete"] is True
    assert mlp_amp.main(["--device", "cpu", "--width", str(1 << 20)]) == 1
    assert "are available" in capsys.readouterr().err


def test_an_interrupted_run_is_reported(monkeypatch, capsys, tmp_path):
    def stopped(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(mlp_amp, "measure", stopped)
    path = tmp_path / "mlp.json"
    assert mlp_amp.main(["--device", "cpu", "--json", str(path)]) == mlp_amp.INTERRUPTED
    assert "nothing is reported" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "0"], "--width must be at least 1"),
        (["--epochs", "1"], "--epochs must be at least 2"),
        (["--json", "missing/directory/file"], "is not a directory"),
        (["--json", "."], "is a directory, not a file to write"),
        (["--device", "cuda"], "torch sees no GPU"),
        (["--device", "tpu"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_refused(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        mlp_amp.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_backend_that_cannot_be_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("AMPFAST_BACKEND", "abacus")
    with pytest.raises(SystemExit) as stopped:
        mlp_amp.main(["--device", "cpu"])
    assert stopped.value.code == 2
    assert "AMPFAST_BACKEND must be one of" in capsys.readouterr().err
