"""Choice of a backend, on this machine and on simulated ones; reports; equal bits; cores."""

from __future__ import annotations

import dataclasses
import math
import runpy
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.one_step import floats, setup
from support.optimizers import FUSED, OPTIMIZERS
from support.reference_launcher import ReferenceLauncher
from support.twins import assert_sides_same, side
from torch.utils.flop_counter import FlopCounterMode

import ampfast
from ampfast import GradScaler, backends, cores, gradients, info
from ampfast.backends import core, cpu
from ampfast.backends.torch_ops import TensorList

NAMES = ["cuda", "triton", "cpu", "aten"]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_report_names_every_backend() -> None:
    report = backends.report()
    assert sorted(r.name for r in report) == sorted(NAMES)
    for entry in report:
        assert type(entry) is backends.BackendReport
        assert entry.available == (entry.reason == ""), "a reason exactly where it cannot run"
        assert all(isinstance(kind, str) for kind in entry.device_types)
        with pytest.raises(dataclasses.FrozenInstanceError):
            entry.name = "other"
    available = {r.name for r in report if r.available}
    assert {"cpu", "aten"} <= available
    by_name = {r.name: r for r in report}
    assert "cpu" in by_name["cpu"].device_types
    assert by_name["aten"].device_types == (), "it takes every device"


def test_default_for_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMPFAST_BACKEND", raising=False)
    assert backends.default_for(CPU) == "cpu"
    # No kernels of ours: torch's own op runs.
    assert backends.default_for(torch.device("meta")) == "aten"


def test_default_for_each_device_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMPFAST_BACKEND", raising=False)
    available = {r.name for r in backends.report() if r.available}
    for device in ("cpu", "cuda", "meta", "mps", "xpu"):
        assert backends.default_for(torch.device(device)) in available


def train(backend: str | None, kind: str) -> Any:
    arguments: dict[str, Any] = {"init_scale": 2.0**12, "growth_interval": 2}
    run = side(GradScaler, kind, backend=backend, **arguments)
    generator = torch.Generator().manual_seed(3)
    for seed in range(25):
        bad = {0: math.inf, 1: math.nan}.get(int(torch.randint(6, (), generator=generator)))
        run.train(seed, bad)
    return run


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_aten_and_cpu_give_the_same_bits(kind: str) -> None:
    ours, oracle, default = (train(name, kind) for name in ("cpu", "aten", None))
    assert_sides_same(ours, oracle)
    assert_sides_same(ours, default)
    assert ours.scaler.get_scale() != 2.0**12, "the scale should have moved"


@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize("kind", ["sgd", *FUSED])
def test_every_backend_never_corrupts_parameters(kind: str, backend: str) -> None:
    for scale, value in ((2.0**-128, 1.0), (0.5, torch.finfo(torch.float32).max), (0.0, 0.0)):
        run = side(GradScaler, kind, backend=backend, init_scale=scale)
        before = [p.detach().clone() for p in run.model.parameters()]
        run.scaler.scale(torch.ones(()))
        for p in run.model.parameters():
            p.grad = torch.full_like(p, value)
        run.scaler.step(run.optimizer)
        assert run.scaler.step_skipped(run.optimizer)
        assert all(torch.equal(p, b) for p, b in zip(run.model.parameters(), before, strict=True))


FUSED_QUOTIENTS = [
    (torch.float16, 2.0**-30, 2.0**-24, 0.0),
    (torch.float16, 2.0**-30, 2.0**-10, 0.0),
    (torch.float16, 2.0**17, 6e4, 0.0),
    (torch.float16, 2.0**-140, 1.0, 1.0),
    (torch.bfloat16, 3.0, 1e-3, 0.0),
    (torch.bfloat16, 0.5, torch.finfo(torch.bfloat16).max, 1.0),
    (torch.bfloat16, 1 - 2.0**-12, torch.finfo(torch.bfloat16).max, 0.0),
    (torch.float64, 2.0**-100, 1e300, 1.0),
    (torch.float64, 2.0**-100, 1e270, 0.0),
    (torch.float32, 1 - 2.0**-24, torch.finfo(torch.float32).max, 1.0),
]


@pytest.mark.parametrize(("dtype", "scale", "value", "expected"), FUSED_QUOTIENTS)
@pytest.mark.parametrize("backend", ["cpu", "aten"])
def test_fused_quotients_are_judged_alike(
    backend: str, dtype: torch.dtype, scale: float, value: float, expected: float
) -> None:
    run = setup(
        lambda *args, **kwargs: GradScaler(*args, backend=backend, **kwargs),
        "fused_adam",
        [floats(1.0, value, dtype=dtype)],
        scale,
    )
    run.step()
    assert run.calls[0][1].item() == expected


@pytest.mark.parametrize("backend", [1, b"cpu", ["cpu"], True])
def test_backend_of_a_wrong_type(backend: Any) -> None:
    with pytest.raises(TypeError, match=rf"backend.*{type(backend).__name__}"):
        GradScaler("cpu", backend=backend)


@pytest.mark.parametrize("backend", ["cudnn", "", "CPU", " cpu"])
def test_unknown_backend(backend: str) -> None:
    with pytest.raises(ValueError, match="backend") as raised:
        GradScaler("cpu", backend=backend)
    assert repr(backend) in str(raised.value)
    assert all(name in str(raised.value) for name in NAMES)


def test_unavailable_backend_gives_a_reason() -> None:
    missing = [r for r in backends.report() if not r.available]
    for entry in missing:
        with pytest.raises(RuntimeError, match=entry.name) as raised:
            GradScaler("cpu", backend=entry.name)
        assert entry.reason in str(raised.value)


TRAIN = """
import torch, ampfast
parameter = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([parameter], lr=0.5)
scaler = ampfast.GradScaler("cpu")
scaler.scale(parameter.sum()).backward()
with torch.profiler.profile() as profile:
    scaler.step(optimizer)
print(ampfast.backends.default_for(torch.device("cpu")))
print(parameter.tolist())
print(any("_amp_foreach_non_finite" in event.key for event in profile.key_averages()))
"""


def trained(name: str) -> list[str]:
    """Output of TRAIN; torch's own op runs for aten alone."""
    return [name, "[0.5, 0.5, 0.5]", str(name == "aten")]


@pytest.mark.parametrize(("value", "name"), [(None, "cpu"), ("", "cpu"), ("aten", "aten")])
def test_environment_sets_the_default(
    value: str | None,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("AMPFAST_BACKEND", raising=False)
    if value is not None:
        monkeypatch.setenv("AMPFAST_BACKEND", value)
    exec(TRAIN, {})
    assert capsys.readouterr().out.splitlines() == trained(name)


def test_environment_that_cannot_be_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPFAST_BACKEND", "cudnn")
    for call in (lambda: GradScaler("cpu"), lambda: backends.default_for(CPU)):
        with pytest.raises(ValueError, match="AMPFAST_BACKEND") as raised:
            call()
        assert "cudnn" in str(raised.value)


def test_environment_that_names_an_unavailable_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in backends.report():
        if not entry.available:
            monkeypatch.setenv("AMPFAST_BACKEND", entry.name)
            for call in (lambda: GradScaler("cpu"), lambda: backends.default_for(CPU)):
                with pytest.raises(RuntimeError, match="AMPFAST_BACKEND") as raised:
                    call()
                assert entry.reason in str(raised.value)


def test_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPFAST_BACKEND", "aten")
    run = side(GradScaler, "sgd", backend="cpu")
    run.scaler.scale(torch.ones(()))
    for p in run.model.parameters():
        p.grad = torch.ones_like(p)
    with torch.profiler.profile() as profile:
        run.scaler.step(run.optimizer)
    assert not any("_amp_foreach" in event.key for event in profile.key_averages())


CACHED = (
    *("_choice", "_launcher", "_kernels"),
    *("_unavailable_reason", "_failure_reason", "_default_on_gpu", "_warn_once"),
)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clears cached facts about this machine before and after."""
    monkeypatch.delenv("AMPFAST_BACKEND", raising=False)
    cached = [getattr(backends, name) for name in CACHED]
    for function in cached:
        function.cache_clear()
    yield
    monkeypatch.undo()
    for function in cached:
        function.cache_clear()


def machine(
    monkeypatch: pytest.MonkeyPatch, missing: dict[str, str], failing: dict[str, str]
) -> None:
    """Simulated machine with a GPU, whose backends are missing or fail for these reasons."""
    monkeypatch.setattr(backends, "_takes_cpu", lambda name: False)
    monkeypatch.setattr(backends, "_unavailable_reason", lambda name: missing.get(name, ""))
    monkeypatch.setattr(backends, "_failure_reason", lambda name, index: failing.get(name, ""))
    kernels = {"aten": backends.TORCH_OPS, "cpu": cpu}
    monkeypatch.setattr(backends, "_kernels", lambda name: kernels.get(name, name))


def walk_over(monkeypatch: pytest.MonkeyPatch, gradient: torch.Tensor, gpu: torch.device) -> None:
    """Gradients of a walk that finds one on a GPU, in a list if kernels serve GPUs."""

    def walk(param_groups: Any, allow_fp16: bool, writes: bool, devices: int, *_: Any) -> Any:
        if devices & core.CUDA:
            return [SimpleNamespace(device=gpu)], [], None
        return [], [(gradient, gradient, 0, core.kind_of(gradient))], None

    monkeypatch.setattr(core, "walk", walk)


@pytest.mark.parametrize(
    ("missing", "failing", "chosen"),
    [
        ((), (), "cuda"),
        (("triton",), (), "cuda"),
        ((), ("triton",), "cuda"),
        (("cuda",), (), "triton"),
        ((), ("cuda",), "triton"),
        (("triton", "cuda"), (), "aten"),
        (("triton",), ("cuda",), "aten"),
        (("cuda",), ("triton",), "aten"),
        ((), ("triton", "cuda"), "aten"),
    ],
)
def test_default_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    missing: tuple[str, ...],
    failing: tuple[str, ...],
    chosen: str,
) -> None:
    machine(monkeypatch, dict.fromkeys(missing, "not there"), dict.fromkeys(failing, "no compiler"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert backends.default_for(GPU) == chosen
    # Nobody misses the kernels that precede those that run, or follow them.
    reasons = dict.fromkeys(missing if chosen == "aten" else (), "not there")
    if chosen != "cuda":
        reasons |= dict.fromkeys(failing, "no compiler")
    assert {str(w.message) for w in caught} == {
        f"ampfast does not use its backend {name!r}: {reason}" for name, reason in reasons.items()
    }
    assert len(caught) == len(reasons)
    both = core.CPU | core.CUDA
    choice = backends.choose()
    assert (choice.kernels_for(GPU) is backends.TORCH_OPS) == (chosen == "aten")
    assert choice.devices == both
    assert backends.default_for(CPU) == "cpu"


def test_no_gpu_is_nobodys_surprise(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, dict.fromkeys(("triton", "cuda"), backends._NO_GPU), {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.default_for(GPU) == "aten"


@pytest.mark.parametrize("name", [None, "triton"])
def test_interpreted_kernels_are_for_cpu_tensors(
    monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    machine(monkeypatch, {}, {})
    monkeypatch.setattr(backends, "_takes_cpu", lambda name: name == "triton")
    assert backends.choose(name).name_for(GPU) == "cuda"
    assert backends.choose(name).name_for(CPU) == ("triton" if name else "cpu")


def test_interpreted_kernels_leave_a_gpu_without(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, {"cuda": "not there"}, {})
    monkeypatch.setattr(backends, "_takes_cpu", lambda name: name == "triton")
    with pytest.warns(UserWarning) as caught:
        assert backends.choose("triton").name_for(GPU) == "aten"
    missing, interpreted = (str(w.message) for w in caught)
    assert missing.endswith("'cuda': not there")
    assert "'triton': TRITON_INTERPRET is set" in interpreted


@pytest.mark.parametrize(("name", "least"), [("cuda", (7, 0)), ("triton", (8, 0))])
def test_an_old_card_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, least: tuple[int, int]
) -> None:
    capability = [(least[0] - 1, 9)]
    monkeypatch.setattr(backends, "_takes_cpu", lambda name: False)
    monkeypatch.setattr(backends, "_try_out", lambda name, device: "tried")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    reason = backends._failure_reason(name, 0)
    assert reason == f"cuda:0 has compute capability below {least[0]}.{least[1]}"
    capability[0] = least
    assert backends._failure_reason(name, 1) == "tried"


def unlike_gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Simulated machine with three GPUs, the second too old; records trials by device."""
    tried: list[tuple[str, str]] = []

    def try_out(name: str, device: torch.device) -> str:
        tried.append((name, str(device)))
        return ""

    monkeypatch.setattr(backends, "_takes_cpu", lambda name: False)
    monkeypatch.setattr(backends, "_unavailable_reason", lambda name: "")
    monkeypatch.setattr(backends, "_try_out", try_out)
    monkeypatch.setattr(backends, "_kernels", lambda name: f"{name}'s")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    capabilities = {"cuda:0": (9, 0), "cuda:1": (6, 1), "cuda:2": (8, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capabilities[str(d)])
    return tried


@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_a_named_backend_is_tried_on_each_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tried = unlike_gpus(monkeypatch)
    choice = backends.choose(name)
    for _ in range(2):
        for gpu in (GPU, torch.device("cuda"), torch.device("cuda", 2)):
            assert choice.name_for(gpu) == name
            assert choice.kernels_for(gpu) == f"{name}'s"
        for ask in (choice.name_for, choice.kernels_for):
            with pytest.raises(RuntimeError, match="here: cuda:1 has compute capability"):
                ask(torch.device("cuda", 1))
    assert tried == [(name, "cuda:0"), (name, "cuda:2")]


def test_the_default_is_that_of_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = unlike_gpus(monkeypatch)
    choice = backends.choose()
    with pytest.warns(UserWarning) as caught:
        for _ in range(2):
            assert choice.name_for(GPU) == choice.name_for(torch.device("cuda")) == "cuda"
            assert choice.name_for(torch.device("cuda", 1)) == "aten"
            assert choice.kernels_for(torch.device("cuda", 1)) == "aten's"
    old = "cuda:1 has compute capability below"
    assert [str(w.message) for w in caught] == [
        f"ampfast does not use its backend 'cuda': {old} 7.0",
        f"ampfast does not use its backend 'triton': {old} 8.0",
    ]
    assert tried == [("cuda", "cuda:0")]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert choice.name_for(torch.device("cuda")) == "aten", "another one is current"


def test_gradients_on_a_gpu_without_kernels_take_torchs_op(monkeypatch: pytest.MonkeyPatch) -> None:
    unlike_gpus(monkeypatch)
    monkeypatch.setattr(
        backends, "_kernels", lambda name: backends.TORCH_OPS if name == "aten" else name
    )
    gradient = torch.ones(3)
    choice = backends.choose()

    def collect() -> gradients.Gradients:
        return gradients.collect([], allow_fp16=False, writes=True, choice=choice)

    walk_over(monkeypatch, gradient, GPU)
    assert [kernels for kernels, _ in collect().lists] == ["cuda"]
    walk_over(monkeypatch, gradient, torch.device("cuda", 1))
    with pytest.warns(UserWarning, match="cuda:1 has compute capability below"):
        aside = collect()
    assert aside.lists == [(backends.TORCH_OPS, TensorList.of([gradient]))]


def test_common_reasons_of_gpus_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, {}, {"cuda": "no image"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(3):
            assert backends.default_for(torch.device("cuda", index)) == "triton"
    assert len(caught) == 1


def test_missing_requirements_have_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(backends, "_launcher", missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert backends._unavailable_reason("triton") == "no triton; pip install 'triton>=3.6'"
    reason = backends._unavailable_reason("cuda")
    assert reason.startswith("no cuda; install a wheel of ampfast, or from source where nvcc")


@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_a_named_backend_never_falls_back(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine(monkeypatch, {}, {name: "no compiler"})
    scaler = GradScaler("cpu", backend=name)  # touches no GPU
    scaler.scale(torch.ones(()))
    walk_over(monkeypatch, torch.ones(3), GPU)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{name}.* cannot run here: no compiler"):
            scaler.unscale_(optimizer)


@pytest.mark.parametrize("name", ["triton", "cuda"])
@pytest.mark.parametrize("source", ["backend", "AMPFAST_BACKEND"])
def test_a_missing_backend_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, name: str, source: str
) -> None:
    machine(monkeypatch, {name: "not there"}, {})
    arguments = {"backend": name} if source == "backend" else {}
    if not arguments:
        monkeypatch.setenv(source, name)
    with pytest.raises(RuntimeError, match=f"{source} '{name}' cannot run here: not there"):
        GradScaler("cpu", **arguments)


def test_a_named_backend_leaves_other_devices_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, {}, {})
    assert backends.choose("cuda").name_for(GPU) == "cuda"
    assert backends.choose("cuda").name_for(CPU) == "cpu"
    assert backends.choose("cpu").name_for(GPU) == "cuda"
    assert backends.choose("triton").name_for(GPU) == "triton"
    assert backends.choose("aten").name_for(GPU) == "aten"
    assert backends.choose("aten").devices == 0
    assert backends.choose().name_for(torch.device("meta")) == "aten"


def test_cuda_is_not_initialised_for_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, {}, {})
    for name in ("_failure_reason", "_default_on_gpu", "_current_gpu"):
        monkeypatch.setattr(backends, name, lambda *args: pytest.fail("asked for a GPU"))
    GradScaler("cpu").scale(torch.ones(()))
    assert backends.choose().devices == core.CPU | core.CUDA


# Trial of the kernels


class Interpreted(ReferenceLauncher):
    INTERPRETED = True


@pytest.mark.parametrize("around", ["inference", "dtype", "mode"])
def test_the_trial_does_not_depend_on_the_caller(
    monkeypatch: pytest.MonkeyPatch, around: str
) -> None:
    monkeypatch.setattr(backends, "_launcher", lambda name: Interpreted())
    if around == "inference":
        with torch.inference_mode():
            assert backends._failure_reason("triton", None) == ""
    elif around == "mode":
        with FlopCounterMode(display=False):
            assert backends._failure_reason("triton", None) == ""
    else:
        torch.set_default_dtype(torch.float64)
        try:
            assert backends._failure_reason("triton", None) == ""
        finally:
            torch.set_default_dtype(torch.float32)


class Wrong(Interpreted):
    def multi_tensor(self, work: Any, *more: Any) -> None:
        super().multi_tensor(work, *more)
        work.found_inf.fill_(1.0)


class Broken(Interpreted):
    def multi_tensor(self, *given: Any) -> None:
        raise ValueError("cannot be compiled\nand much more")


@pytest.mark.parametrize(
    ("launcher", "reason"),
    [
        (Interpreted(), ""),
        (Wrong(), "its kernel unscaled 8 by 4 to "),
        (Broken(), "its kernel does not run: ValueError: cannot be compiled"),
    ],
    ids=["works", "wrong", "broken"],
)
def test_kernels_are_tried(
    monkeypatch: pytest.MonkeyPatch, launcher: Interpreted, reason: str
) -> None:
    monkeypatch.setattr(backends, "_launcher", lambda name: launcher)
    [triton] = [entry for entry in backends.report() if entry.name == "triton"]
    assert triton.available == (reason == "")
    assert triton.reason.startswith(reason) and "\n" not in triton.reason
    if triton.available:
        assert triton.device_types == ("cpu",), "an interpreter has no GPU"
        assert backends.choose("triton").name_for(CPU) == "triton"


@pytest.mark.parametrize("missing", ["gcc", "my-cc", "Python.h"])
def test_info_says_what_triton_lacks_at_run_time(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_launcher", lambda name: Broken())
    monkeypatch.delenv("CC", raising=False)
    if missing == "Python.h":
        monkeypatch.setattr(sysconfig, "get_path", lambda *names: str(tmp_path))
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
        if missing == "my-cc":
            monkeypatch.setenv("CC", missing)
    lines = info.describe(info.collect()).splitlines()
    [line] = [line for line in lines if "cannot be compiled" in line]
    assert "cannot be compiled; at run time Triton needs" in line and missing in line


def test_headers_are_where_triton_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default scheme of Debian's and Ubuntu's Python 3.10 names another folder."""
    (tmp_path / "Python.h").touch()
    schemes = {"posix_prefix": str(tmp_path)}
    get_path = lambda name, scheme="posix_local": schemes.get(scheme, "/nowhere")  # noqa: E731
    monkeypatch.setattr(sysconfig, "get_path", get_path)
    monkeypatch.setenv("CC", "sh")
    assert backends._what_triton_lacks() == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the backend can run here")
def test_a_disabled_scaler_needs_no_backend_that_runs() -> None:
    GradScaler("cpu", enabled=False, backend="cuda")
    with pytest.raises(RuntimeError, match="cannot run here"):
        GradScaler("cpu", backend="cuda")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """Folder of cores for three versions of torch."""
    for name in ("torch2.9", "torch2.13", "torch2.14", "__pycache__"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.parametrize("patch", ["0", "1+cu130", "0a0+git1234"])
def test_the_core_of_torchs_minor_version_is_chosen(wheel, patch):
    assert cores.folders_for(f"2.13.{patch}", wheel) == [str(wheel / "torch2.13")]


@pytest.mark.parametrize("version", ["2.15.0", "2.1.3", "3.13.0"])
def test_a_torch_without_a_core_gets_the_remedy(wheel, version):
    with pytest.raises(ImportError) as caught:
        cores.folders_for(version, wheel)
    text = str(caught.value)
    assert text.startswith(f"this is torch {version}, and this wheel of ampfast has compiled cores")
    assert "for torch 2.9, 2.13, 2.14; " in text
    assert "pip install --no-build-isolation ." in text


def test_a_build_for_one_torch_has_no_choice(tmp_path):
    assert cores.folders_for("2.15.0", tmp_path) == []


@pytest.mark.slow
def test_the_package_imports_the_chosen_core(tmp_path):
    """A copy of the package, laid out as in a wheel."""
    source = Path(ampfast.__file__).parent
    package = tmp_path / "ampfast"
    shutil.copytree(
        source, package, ignore=shutil.ignore_patterns("_C.*", "torch2*", "__pycache__")
    )
    minor = ".".join(torch.__version__.split(".")[:2])
    for name in (f"torch{minor}", "torch2.1"):
        (package / "cores" / name).mkdir()
    core = Path(ampfast._C.__file__)
    shutil.copy(core, package / "cores" / f"torch{minor}")
    command = [sys.executable, "-c", "import ampfast; print(ampfast._C.__file__)"]
    run = {"cwd": tmp_path, "capture_output": True, "text": True}
    result = subprocess.run(command, check=True, **run)
    assert result.stdout.strip() == str(package / "cores" / f"torch{minor}" / core.name)

    shutil.rmtree(package / "cores" / f"torch{minor}")
    result = subprocess.run(command, check=False, **run)
    last = result.stderr.strip().rpartition("\n")[2]
    assert last.startswith(f"ImportError: this is torch {torch.__version__}, and this wheel")


def test_a_core_for_another_torch_is_refused():
    core._require_torch("2.13.0", "2.13.1+cu130")
    for other in ("2.14.0", "3.13.0", "2.1.3"):
        with pytest.raises(ImportError, match=f"for torch 2.13.0, and this is torch {other}; "):
            core._require_torch("2.13.0", other)


def test_a_core_that_cannot_be_loaded_has_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "ampfast._C", None)
    monkeypatch.delattr(ampfast, "_C")
    with pytest.raises(ImportError, match=r"core cannot be loaded \(.*_C.*\); build it against"):
        runpy.run_path(core.__file__)
