"""The examples run with equal results for both scalers; the notebook's outputs are current."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from support.processes import ROOT, module_at, threads

pytestmark = pytest.mark.sweep

FOLDER = ROOT / "examples"
NOTEBOOK = FOLDER / "underflow.ipynb"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads wait for each other on a busy machine."""
    with threads(1):
        yield


def example(name: str) -> ModuleType:
    """An example as a module, without training."""
    return module_at(FOLDER / f"{name}.py")


@pytest.mark.parametrize(
    ("name", "needs", "short", "begins"),
    [
        ("digits", "sklearn", ("--epochs", "1"), "accuracy "),
        ("language", "torch", ("--steps", "5"), "loss on unseen files "),
        ("gan", "torch", ("--steps", "15"), ""),
        ("reinforcement", "gymnasium", ("--updates", "10"), "an episode takes "),
    ],
)
def test_both_scalers_give_the_same(
    name: str, needs: str, short: tuple[str, ...], begins: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(needs, reason=f"examples/{name}.py needs {needs}")
    module = example(name)

    def printed(*arguments: str) -> list[str]:
        module.main([*arguments, *short, "--device", "cpu"])
        return capsys.readouterr().out.splitlines()

    *_, theirs = printed("--scaler", "torch")
    assert theirs.startswith(begins) and "sum of all parameters" in theirs
    runs = [["--scaler", "ampfast"]]
    if name == "digits":
        runs.append(["--scaler", "ampfast", "--together"])
    for run in runs:
        lines = printed(*run)
        assert lines[-1] == theirs
        # Otherwise the scalers were not exercised.
        counts = [re.search(r"steps=(\d+), skipped=(\d+)", line) for line in lines]
        [(steps, skipped)] = [map(int, count.groups()) for count in counts if count]
        assert 0 < skipped < steps


def test_fine_tuning_in_16_bit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    example("finetune_16bit").main(["--steps", "30", "--device", "cpu"])
    before, _, *rows = capsys.readouterr().out.splitlines()
    first = float(before.split()[-1])
    gains = {row[:14].strip(): [first - float(loss) for loss in row[14:].split()] for row in rows}
    fp32, bf16, bf16_masters, fp16, fp16_masters = gains.values()
    assert fp32[1] > 5 * fp32[0] > 0
    # 30 steps of 1e-5 are below the spacing of most bfloat16 weights.
    assert bf16[0] < fp32[0] / 4 and bf16[1] < fp32[1] / 2
    assert all(map(math.isnan, fp16))
    # Twice what was seen; forward and backward are 16 bit.
    assert bf16_masters[1] == pytest.approx(fp32[1], rel=0.1)
    assert fp16_masters == pytest.approx(fp32, rel=0.02, abs=2e-4)


def test_bad_batches_are_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    example("spikes").main(["--steps", "130", "--device", "cpu"])
    *_, clean, clipped, skipped = (row[18:].split() for row in capsys.readouterr().out.splitlines())
    assert clean[1:] == clipped[1:] == ["0", "0"]
    assert skipped[1] == "8" and int(skipped[2]) <= 2
    assert float(skipped[0]) - float(clean[0]) < 0.1 < float(clipped[0]) - float(clean[0])


def test_the_documentation_lists_all() -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[.+?\]\(\.\./(.+?)\) \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(
        path.relative_to(ROOT).as_posix()
        for path in FOLDER.iterdir()
        if path.suffix in {".py", ".ipynb"}
    )


# As the notebook's text says.
NOTEBOOK_CLAIMS = """
assert with_scaler[-1] < 1.5 * in_float32[-1]
assert without_scaler[-1] > 2 * in_float32[-1]
lost, kept = (gradients(half=True, scale=scale) == 0 for scale in (1.0, 2.0**16))
assert lost.double().mean() > 0.1 > 100 * kept.double().mean()
assert 4 < scaler.stats().skipped < 50
history = clipped.history()
assert history.skipped.nonzero().flatten().tolist() == [70]
assert history.grad_norm[40] > 1e-4 > history.grad_norm[39]
"""


def kinds(notebook: Any) -> list[list[Any]]:
    """Text outputs and pictures of each cell.

    Without figures, which depend on processor and torch.
    """
    return [
        [
            re.sub(r"skipped|stepped| *[\d.]+(e[+-]\d+)?", "0", output.text)
            if output.output_type == "stream"
            else sorted(output.data)
            for output in cell.outputs
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_the_notebook_was_run_after_its_last_edit() -> None:
    nbformat = pytest.importorskip("nbformat", reason="reading the notebook needs nbformat")
    pytest.importorskip("nbclient", reason="reading the notebook needs nbclient")
    from notebooks import digest

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert notebook.metadata.code_sha256 == digest(notebook), "run `make notebook`"


def runner_of_notebooks(monkeypatch: pytest.MonkeyPatch, *modules: str) -> Any:
    """`notebooks.executed`, in the checkout and on one thread, or a skip."""
    for needed in ("nbclient", "ipykernel", *modules):
        pytest.importorskip(needed, reason=f"running the notebook needs {needed}")
    from notebooks import executed

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return executed


@pytest.mark.slow
def test_the_notebook_runs_with_the_saved_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    executed = runner_of_notebooks(monkeypatch, "matplotlib")
    import nbformat

    saved = nbformat.read(NOTEBOOK, as_version=4)
    again = f"run `make notebook`: the outputs in {NOTEBOOK.name} are not those of its code"
    assert kinds(executed(NOTEBOOK, NOTEBOOK_CLAIMS)) == kinds(saved), again


@pytest.mark.sweep
def test_the_gpu_notebook_runs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = runner_of_notebooks(monkeypatch, "sklearn")(FOLDER / "gpu_check.ipynb").cells
    [block] = [output.text for output in cells[-1].outputs]
    assert block.startswith("```text\n") and block.endswith("```\n")
    for told in ("The training is equal bit for bit.", "Nothing differs."):
        assert told in block
