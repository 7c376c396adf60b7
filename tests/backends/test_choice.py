"""Choice of a backend, on this machine and on simulated ones; reports; equal bits; cores."""

from __future__ import annotations

import contextlib
import dataclasses
import runpy
import sys
import warnings

import pytest
import torch
from support.launchers import ReferenceLauncher
from support.steps import floats, setup
from torch.utils.flop_counter import FlopCounterMode

import ampfast
from ampfast import GradScaler, backends, cores
from ampfast.backends import core, cpu

CPU, GPU, OTHER = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
CURRENT = torch.device("cuda")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Clears cached facts about this machine before and after."""
    monkeypatch.delenv("AMPFAST_BACKEND", raising=False)
    monkeypatch.setattr(backends, "_kernels", {"aten": backends.TORCH_OPS, "cpu": cpu})
    cached = backends._choice, backends.support, backends._default_on_gpu
    for function in cached:
        function.cache_clear()
    yield
    monkeypatch.undo()
    for function in cached:
        function.cache_clear()


def test_report_names_every_backend():
    report = backends.report()
    assert sorted(r.name for r in report) == ["aten", "cpu", "cuda", "triton"]
    for entry in report:
        assert type(entry) is backends.BackendReport
        assert entry.available == (entry.reason == ""), "a reason exactly where it cannot run"
        assert all(isinstance(kind, str) for kind in entry.device_types)
        with pytest.raises(dataclasses.FrozenInstanceError):
            entry.name = "other"
        if not entry.available:
            with pytest.raises(RuntimeError, match=entry.name) as raised:
                GradScaler("cpu", backend=entry.name)
            assert entry.reason in str(raised.value)
    device_types = {r.name: r.device_types for r in report if r.available}
    assert "cpu" in device_types["cpu"]
    assert device_types["aten"] == (), "it takes every device"
    for device in ("cpu", "cuda", "meta", "mps", "xpu"):
        assert backends.default_for(torch.device(device)) in device_types


@pytest.mark.parametrize(
    ("environment", "argument", "used"),
    [(None, None, "cpu"), ("", None, "cpu"), ("aten", None, "aten"), ("aten", "cpu", "cpu")],
)
def test_environment_sets_the_default(monkeypatch, environment, argument, used):
    if environment is not None:
        monkeypatch.setenv("AMPFAST_BACKEND", environment)
    assert backends.default_for(CPU) == (environment or "cpu")
    assert backends.default_for(torch.device("meta")) == "aten", "no kernels of ours"
    run = setup(GradScaler, "sgd", [floats(8.0)], 8.0, backend=argument)
    with torch.profiler.profile() as profile:
        run.step()
    assert run.parameters[0].tolist() == [0.5]
    takes_torchs_op = any("_amp_foreach_non_finite" in e.key for e in profile.key_averages())
    assert takes_torchs_op == (used == "aten")


MISSING = r"{} {!r} cannot run here: not"


@pytest.mark.parametrize("source", ["backend", "AMPFAST_BACKEND"])
@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        *((name, ValueError, "{} must be .*aten, got {!r}") for name in ("cudnn", "CPU", " cpu")),
        *((name, RuntimeError, MISSING) for name in ("cuda", "triton")),
        ("", ValueError, "backend .*''"),
        (1, TypeError, "backend.*int"),
        (["cpu"], TypeError, "backend.*list"),
    ],
)
def test_a_backend_that_cannot_be_had_is_refused_at_once(monkeypatch, name, error, text, source):
    machine(monkeypatch, dict.fromkeys(("cuda", "triton"), "not there"), {})
    if source == "backend":
        with pytest.raises(error, match=text.format(source, name)):
            GradScaler("cpu", backend=name)
    elif name and isinstance(name, str):
        monkeypatch.setenv(source, name)
        for call in (lambda: GradScaler("cpu"), lambda: backends.default_for(CPU)):
            with pytest.raises(error, match=text.format(source, name)):
                call()


def machine(monkeypatch, missing, failing):
    """Simulated machine with a GPU, whose backends are missing or fail for these reasons."""

    def support(name, device=None):
        reason = missing.get(name) or (failing.get(name, "") if device else "")
        return backends.Support(reason)

    monkeypatch.setattr(backends, "support", support)
    monkeypatch.setattr(backends, "_takes_cpu", lambda name: False)
    monkeypatch.setattr(backends, "_kernels_of", lambda name: name)


@contextlib.contextmanager
def all_warnings():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts = []
        yield texts
    texts += [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("missing", "failing", "chosen"),
    [
        *(("", "", "cuda"), ("triton", "", "cuda"), ("", "triton", "cuda")),
        *(("cuda", "", "triton"), ("", "cuda", "triton"), ("triton cuda", "", "aten")),
        *(("triton", "cuda", "aten"), ("cuda", "triton", "aten"), ("", "triton cuda", "aten")),
    ],
)
def test_default_on_a_gpu(monkeypatch, missing, failing, chosen):
    missing = dict.fromkeys(missing.split(), "not there")
    failing = dict.fromkeys(failing.split(), "no compiler")
    machine(monkeypatch, missing, failing)
    with all_warnings() as texts:
        for _ in range(2):
            assert backends.default_for(GPU) == chosen
    # Nobody misses the kernels that precede those that run, or follow them.
    reasons = missing if chosen == "aten" else {}
    if chosen != "cuda":
        reasons = reasons | failing
    assert sorted(texts) == sorted(
        f"ampfast does not use its backend {name!r}: {reason}" for name, reason in reasons.items()
    )
    choice = backends.choose()
    assert (choice.kernels_for(GPU) is backends.TORCH_OPS) == (chosen == "aten")
    assert choice.devices == core.CPU | core.CUDA
    assert backends.default_for(CPU) == "cpu"


def test_no_gpu_is_nobodys_surprise(monkeypatch):
    machine(monkeypatch, dict.fromkeys(("triton", "cuda"), backends._NO_GPU), {})
    with all_warnings() as texts:
        assert backends.default_for(GPU) == "aten"
    assert not texts


def unlike_gpus(monkeypatch):
    """Simulated machine with three GPUs, the second too old; records trials by device."""
    tried = []
    capabilities = {"cuda:0": (9, 0), "cuda:1": (6, 9), "cuda:2": (8, 0), "cuda:3": (7, 0)}
    patches = {
        "_takes_cpu": lambda name: False,
        "_what_is_missing": lambda name: "",
        "_try_out": lambda name, device: tried.append((name, str(device))) or "",
        "_kernels_of": lambda name: f"{name}'s",
    }
    for name, replacement in patches.items():
        monkeypatch.setattr(backends, name, replacement)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capabilities[str(d)])
    return tried


def test_the_default_is_that_of_each_gpu(monkeypatch):
    tried = unlike_gpus(monkeypatch)
    choice = backends.choose()
    with all_warnings() as texts:
        for _ in range(2):
            assert choice.name_for(GPU) == choice.name_for(CURRENT) == "cuda"
            assert choice.name_for(OTHER) == "aten"
            assert choice.kernels_for(OTHER) is backends.TORCH_OPS
    old = "cuda:1 has compute capability below"
    assert texts == [
        f"ampfast does not use its backend 'cuda': {old} 7.0",
        f"ampfast does not use its backend 'triton': {old} 8.0",
    ]
    assert tried == [("cuda", "cuda:0")]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert choice.name_for(CURRENT) == "aten", "another one is current"


@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_a_named_backend_never_falls_back(monkeypatch, name):
    machine(monkeypatch, {}, {name: "no compiler"})
    choice = backends.choose(name)  # touches no GPU
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{name}.* cannot run here: no compiler"):
            choice.kernels_for(GPU)


def test_a_named_backend_leaves_other_devices_theirs(monkeypatch):
    machine(monkeypatch, {}, {})
    for name, on_gpu, on_cpu in (
        ("cuda", "cuda", "cpu"),
        ("cpu", "cuda", "cpu"),
        ("triton", "triton", "cpu"),
        ("aten", "aten", "aten"),
    ):
        assert backends.choose(name).name_for(GPU) == on_gpu
        assert backends.choose(name).name_for(CPU) == on_cpu
        assert backends.choose(name).devices == (0 if name == "aten" else core.CPU | core.CUDA)


# Trial of the kernels


class Interpreted(ReferenceLauncher):
    INTERPRETED = True


class Wrong(Interpreted):
    def multi_tensor(self, work, *more):
        super().multi_tensor(work, *more)
        work.found_inf.fill_(1.0)


class Broken(Interpreted):
    def multi_tensor(self, *given):
        raise ValueError("cannot be compiled\nand much more")


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


DOES_NOT_RUN = "its kernel does not run: ValueError: cannot be compiled"


@pytest.mark.parametrize(
    ("launcher", "around", "reason"),
    [
        (Interpreted(), contextlib.nullcontext(), ""),
        (Interpreted(), torch.inference_mode(), ""),
        (Interpreted(), FlopCounterMode(display=False), ""),
        (Interpreted(), default_dtype(torch.float64), ""),
        (Wrong(), contextlib.nullcontext(), "its kernel unscaled 8 by 4 to "),
        (Broken(), contextlib.nullcontext(), DOES_NOT_RUN),
    ],
    ids=["works", "inference", "mode", "dtype", "wrong", "broken"],
)
def test_kernels_are_tried(monkeypatch, launcher, around, reason):
    monkeypatch.setattr(backends, "_launcher", lambda name: launcher)
    with around:
        [triton] = [entry for entry in backends.report() if entry.name == "triton"]
    assert triton.available == (reason == "")
    assert triton.reason.startswith(reason) and "\n" not in triton.reason
    if triton.available:
        assert triton.device_types == ("cpu",), "an interpreter has no GPU"
        assert backends.choose("triton").name_for(CPU) == "triton"
    if reason == DOES_NOT_RUN:
        assert triton.reason.endswith("a C compiler and Python's headers (python3-dev)")


def test_the_core_of_torchs_minor_version_is_chosen(tmp_path):
    assert cores.folders_for("2.15.0", tmp_path) == [], "a build for one torch has no choice"
    for name in ("torch2.9", "torch2.13", "torch2.14", "__pycache__"):
        (tmp_path / name).mkdir()
    for patch in ("0", "1+cu130", "0a0+git1234"):
        assert cores.folders_for(f"2.13.{patch}", tmp_path) == [str(tmp_path / "torch2.13")]
    for version in ("2.15.0", "2.1.3", "3.13.0"):
        with pytest.raises(ImportError) as caught:
            cores.folders_for(version, tmp_path)
        text = str(caught.value)
        start = f"this is torch {version}, and this wheel of ampfast has compiled cores"
        assert text.startswith(start) and "for torch 2.9, 2.13, 2.14; " in text
        assert "pip install --no-build-isolation ." in text


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
