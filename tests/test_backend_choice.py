"""Choice among backends on simulated machines: several GPUs, kernels that fail."""

from __future__ import annotations

import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.reference_launcher import ReferenceLauncher
from torch.utils.flop_counter import FlopCounterMode

from ampfast import GradScaler, backends, info
from ampfast.backends import core, cpu

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
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
