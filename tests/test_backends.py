"""Choice of a backend, on this machine and on simulated ones; reports; equal bits; cores."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import runpy
import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path
from types import SimpleNamespace

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

CPU, GPU, OTHER = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
CURRENT = torch.device("cuda")
CACHED = (
    *("_choice", "_launcher", "_kernels"),
    *("_unavailable_reason", "_failure_reason", "_default_on_gpu", "_warn_once"),
)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Clears cached facts about this machine before and after."""
    monkeypatch.delenv("AMPFAST_BACKEND", raising=False)
    cached = [getattr(backends, name) for name in CACHED]
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


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_aten_and_cpu_give_the_same_bits(kind):
    sides = []
    for backend in ("cpu", "aten", None):
        sides.append(side(GradScaler, kind, backend=backend, init_scale=4096.0, growth_interval=2))
        generator = torch.Generator().manual_seed(3)
        for seed in range(25):
            bad = {0: math.inf, 1: math.nan}.get(int(torch.randint(6, (), generator=generator)))
            sides[-1].train(seed, bad)
    assert_sides_same(sides[0], sides[1])
    assert_sides_same(sides[0], sides[2])
    assert sides[0].scaler.get_scale() != 4096.0, "the scale should have moved"


@pytest.mark.parametrize("backend", ["cpu", "aten"])
@pytest.mark.parametrize("kind", ["sgd", *FUSED])
def test_every_backend_never_corrupts_parameters(kind, backend):
    for scale, value in ((2.0**-128, 1.0), (0.5, torch.finfo(torch.float32).max), (0.0, 0.0)):
        run = setup(GradScaler, kind, [floats(value, value)] * 4, scale, backend=backend)
        run.step()
        assert run.scaler.step_skipped(run.optimizer)
        assert all(param.tolist() == [1.0, 1.0] for param in run.parameters)


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
def test_fused_quotients_are_judged_alike(backend, dtype, scale, value, expected):
    gradients = [floats(1.0, value, dtype=dtype)]
    run = setup(GradScaler, "fused_adam", gradients, scale, backend=backend)
    run.step()
    assert run.calls[0][1].item() == expected


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


@pytest.mark.parametrize("backend", [1, b"cpu", ["cpu"], True])
def test_backend_of_a_wrong_type(backend):
    with pytest.raises(TypeError, match=rf"backend.*{type(backend).__name__}"):
        GradScaler("cpu", backend=backend)


UNKNOWN = [(name, ValueError, "{} .*{!r}") for name in ("cudnn", "CPU", " cpu")]
MISSING = [(name, RuntimeError, "{} {!r} cannot run here: not") for name in ("cuda", "triton")]


@pytest.mark.parametrize("source", ["backend", "AMPFAST_BACKEND"])
@pytest.mark.parametrize(("name", "error", "text"), UNKNOWN + MISSING)
def test_a_backend_that_cannot_be_had_is_refused_at_once(monkeypatch, name, error, text, source):
    machine(monkeypatch, dict.fromkeys(("cuda", "triton"), "not there"), {})
    calls = [lambda: GradScaler("cpu", backend=name)]
    if source == "AMPFAST_BACKEND":
        monkeypatch.setenv(source, name)
        calls = [lambda: GradScaler("cpu"), lambda: backends.default_for(CPU)]
    for call in calls:
        with pytest.raises(error, match=text.format(source, name)) as raised:
            call()
        assert error is RuntimeError or all(each in str(raised.value) for each in backends.NAMES)


def test_the_empty_name_is_no_backend():
    with pytest.raises(ValueError, match=r"backend .*''"):
        GradScaler("cpu", backend="")


def machine(monkeypatch, missing, failing, interpreted=False):
    """Simulated machine with a GPU, whose backends are missing or fail for these reasons."""
    monkeypatch.setattr(backends, "_takes_cpu", lambda name: interpreted and name == "triton")
    monkeypatch.setattr(backends, "_unavailable_reason", lambda name: missing.get(name, ""))
    monkeypatch.setattr(backends, "_failure_reason", lambda name, index: failing.get(name, ""))
    kernels = {"aten": backends.TORCH_OPS, "cpu": cpu}
    monkeypatch.setattr(backends, "_kernels", lambda name: kernels.get(name, name))


def walk_over(monkeypatch, gradient, gpu):
    """Gradients of a walk that finds one on a GPU, in a list if kernels serve GPUs."""

    def walk(param_groups, allow_fp16, writes, devices, *_):
        if devices & core.CUDA:
            return [SimpleNamespace(device=gpu)], [], None
        return [], [(gradient, gradient, 0, core.kind_of(gradient))], None

    monkeypatch.setattr(core, "walk", walk)


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
        ("", "", "cuda"),
        ("triton", "", "cuda"),
        ("", "triton", "cuda"),
        ("cuda", "", "triton"),
        ("", "cuda", "triton"),
        ("triton cuda", "", "aten"),
        ("triton", "cuda", "aten"),
        ("cuda", "triton", "aten"),
        ("", "triton cuda", "aten"),
    ],
)
def test_default_on_a_gpu(monkeypatch, missing, failing, chosen):
    missing = dict.fromkeys(missing.split(), "not there")
    failing = dict.fromkeys(failing.split(), "no compiler")
    machine(monkeypatch, missing, failing)
    with all_warnings() as texts:
        for index in (0, 0, 1, 2):
            assert backends.default_for(torch.device("cuda", index)) == chosen
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.default_for(GPU) == "aten"


def test_interpreted_kernels_are_for_cpu_tensors(monkeypatch):
    machine(monkeypatch, {}, {}, interpreted=True)
    for name, on_cpu in ((None, "cpu"), ("triton", "triton")):
        assert backends.choose(name).name_for(GPU) == "cuda"
        assert backends.choose(name).name_for(CPU) == on_cpu
    backends._default_on_gpu.cache_clear()
    machine(monkeypatch, {"cuda": "not there"}, {}, interpreted=True)
    with all_warnings() as texts:
        assert backends.choose("triton").name_for(GPU) == "aten"
    missing, interpreted = texts
    assert missing.endswith("'cuda': not there")
    assert "'triton': TRITON_INTERPRET is set" in interpreted


def unlike_gpus(monkeypatch):
    """Simulated machine with three GPUs, the second too old; records trials by device."""
    tried = []
    capabilities = {"cuda:0": (9, 0), "cuda:1": (6, 9), "cuda:2": (8, 0), "cuda:3": (7, 0)}
    patches = {
        "_takes_cpu": lambda name: False,
        "_unavailable_reason": lambda name: "",
        "_try_out": lambda name, device: tried.append((name, str(device))) or "",
        "_kernels": lambda name: backends.TORCH_OPS if name == "aten" else f"{name}'s",
    }
    for name, replacement in patches.items():
        monkeypatch.setattr(backends, name, replacement)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capabilities[str(d)])
    return tried


@pytest.mark.parametrize(("name", "least", "old"), [("triton", (8, 0), 3), ("cuda", (7, 0), 1)])
def test_a_named_backend_is_tried_on_each_gpu(monkeypatch, name, least, old):
    tried = unlike_gpus(monkeypatch)
    choice = backends.choose(name)
    for _ in range(2):
        for gpu in (GPU, CURRENT, torch.device("cuda", 2)):
            assert choice.name_for(gpu) == name
            assert choice.kernels_for(gpu) == f"{name}'s"
        reason = f"here: cuda:{old} has compute capability below {least[0]}.{least[1]}$"
        for ask in (choice.name_for, choice.kernels_for):
            with pytest.raises(RuntimeError, match=reason):
                ask(torch.device("cuda", old))
    assert tried == [(name, "cuda:0"), (name, "cuda:2")]
    if name == "cuda":
        assert choice.name_for(torch.device("cuda", 3)) == "cuda"


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


def test_gradients_on_a_gpu_without_kernels_take_torchs_op(monkeypatch):
    unlike_gpus(monkeypatch)
    gradient, choice = torch.ones(3), backends.choose()
    lists = []
    for gpu in (GPU, OTHER):
        walk_over(monkeypatch, gradient, gpu)
        with all_warnings() as texts:
            found = gradients.collect([], allow_fp16=False, writes=True, choice=choice)
        lists.append(found.lists)
    assert "cuda:1 has compute capability below" in texts[0]
    assert [kernels for kernels, _ in lists[0]] == ["cuda's"]
    assert lists[1] == [(backends.TORCH_OPS, TensorList.of([gradient]))]


def test_missing_requirements_have_a_remedy(monkeypatch):
    def missing(name):
        raise ImportError(f"no {name}")

    monkeypatch.setattr(backends, "_launcher", missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert backends._unavailable_reason("triton") == "no triton; pip install 'triton>=3.6'"
    reason = backends._unavailable_reason("cuda")
    assert reason.startswith("no cuda; install a wheel of ampfast, or from source where nvcc")


@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_a_named_backend_never_falls_back(monkeypatch, name):
    machine(monkeypatch, {}, {name: "no compiler"})
    run = setup(GradScaler, "sgd", [floats(1.0)], backend=name)  # touches no GPU
    run.parameters[0].grad = None
    walk_over(monkeypatch, torch.ones(3), GPU)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{name}.* cannot run here: no compiler"):
            run.scaler.unscale_(run.optimizer)


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


def test_cuda_is_not_initialised_for_a_choice(monkeypatch):
    machine(monkeypatch, {}, {})
    for name in ("_failure_reason", "_default_on_gpu", "_current_gpu"):
        monkeypatch.setattr(backends, name, lambda *args: pytest.fail("asked for a GPU"))
    GradScaler("cpu").scale(torch.ones(()))
    assert backends.choose().devices == core.CPU | core.CUDA


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


@pytest.mark.parametrize("missing", ["gcc", "my-cc", "Python.h"])
def test_info_says_what_triton_lacks_at_run_time(missing, tmp_path, monkeypatch):
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


def test_headers_are_where_triton_looks(tmp_path, monkeypatch):
    """The default scheme of Debian's and Ubuntu's Python 3.10 names another folder."""
    (tmp_path / "Python.h").touch()
    schemes = {"posix_prefix": str(tmp_path)}
    get_path = lambda name, scheme="posix_local": schemes.get(scheme, "/nowhere")  # noqa: E731
    monkeypatch.setattr(sysconfig, "get_path", get_path)
    monkeypatch.setenv("CC", "sh")
    assert backends._what_triton_lacks() == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the backend can run here")
def test_a_disabled_scaler_needs_no_backend_that_runs():
    GradScaler("cpu", enabled=False, backend="cuda")
    with pytest.raises(RuntimeError, match="cannot run here"):
        GradScaler("cpu", backend="cuda")


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


@pytest.mark.slow
def test_the_package_imports_the_chosen_core(tmp_path):
    """A copy of the package, laid out as in a wheel."""
    package = tmp_path / "ampfast"
    ignored = shutil.ignore_patterns("_C.*", "torch2*", "__pycache__")
    shutil.copytree(Path(ampfast.__file__).parent, package, ignore=ignored)
    chosen = package / "cores" / "torch{}.{}".format(*torch.__version__.split("."))
    for folder in (chosen, package / "cores" / "torch2.1"):
        folder.mkdir()
    core = Path(ampfast._C.__file__)
    shutil.copy(core, chosen)
    command = [sys.executable, "-c", "import ampfast; print(ampfast._C.__file__)"]
    run = {"cwd": tmp_path, "capture_output": True, "text": True}
    result = subprocess.run(command, check=True, **run)
    assert result.stdout.strip() == str(chosen / core.name)

    shutil.rmtree(chosen)
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
