"""The sweep over the kernels' switches: order, results, libraries, ranking."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess

import pytest
import torch
import torch.utils.cpp_extension
from nvcc import NVCC
from simulated import CPU, HostQueue, TableLauncher, on

from ampfast.backends.gpu import DeviceKernels, Epilogue, Pass, Use
from benchmarks import __main__ as command
from benchmarks import decisive, machine, providers, sweep, tables
from benchmarks.results import Results, Row, Spread
from benchmarks.sweep import BACKENDS, FIRST, Variant


@pytest.fixture
def backends(monkeypatch):
    monkeypatch.setattr(providers, "available", lambda device: (["triton"], []))


@pytest.fixture
def applied(monkeypatch, backends):
    """Variants run torch's ops; returns those that did."""
    found = []

    @contextlib.contextmanager
    def apply(variant, device):
        found.append(variant)
        yield DeviceKernels(TableLauncher())

    monkeypatch.setattr(sweep, "applied", apply)
    return found


def test_what_changes_least_comes_first_and_cuda_has_time_to_compile():
    found = sweep.variants(BACKENDS)
    assert len(set(found)) == len(found) == 2 * 6 * 3 * 2**3
    assert len({each.name for each in found}) == len(found)
    assert found[0] == FIRST
    single = 5 + 2 + 3
    assert [each.backend for each in found[: 2 * single + 2]] == [
        *((single + 1) * ["triton"]),
        *((single + 1) * ["cuda"]),
    ]
    assert found[single + 1] == Variant("cuda")
    last = Variant("triton", 16, 16, True, True, True)
    assert last.name == "triton, 16 programs, 32 KiB, contiguous, prefetch, stream"
    assert last in found[-20:]
    assert {each.backend for each in sweep.variants(["cuda"])} == {"cuda"}


def test_a_sweep_is_written_and_ranked(applied, tmp_path, capsys, monkeypatch):
    few = sweep.variants(["triton"])[:3]
    monkeypatch.setattr(sweep, "variants", lambda backends: few)
    file = tmp_path / "sweep.json"
    assert command.main(["--only", "sweep", "--rehearse", "--json", str(file)]) == 0
    assert applied == few
    rows = Results.read(file).rows
    calls = [(name, call) for name, _ in sweep.LISTS for call in ("check", "unscale")]
    for variant in few:
        of = [r for r in rows if r.side == f"ampfast, {variant.name}"]
        assert [(row.case.removesuffix(", cold"), row.call) for row in of] == calls
        assert all(row.percent_of_copy for row in of)
    table = tables.ranking(rows)
    assert sorted(line[0] for line in table.lines) == sorted(f"ampfast, {v.name}" for v in few)
    assert len(table.header) == len(table.lines[0]) == 2 + len(calls)
    assert "the best come first" in table.how


def test_a_wrong_variant_is_not_timed(monkeypatch, backends):
    class Wrong(TableLauncher):
        def multi_tensor(self, work, segment, epilogue):
            super().multi_tensor(work._replace(write=False), segment, epilogue)

    monkeypatch.setattr(sweep, "applied", lambda *_: contextlib.nullcontext(DeviceKernels(Wrong())))
    monkeypatch.setattr(decisive, "interleave", lambda *arguments: pytest.fail("was timed"))
    with pytest.raises(AssertionError, match="unscale by triton"):
        sweep.measure(FIRST, (), on(HostQueue()))


def test_tritons_switches_are_set_and_reset(monkeypatch):
    launch = pytest.importorskip("ampfast.backends.triton.launch")
    calls = []
    monkeypatch.setattr(launch, "tune", lambda *given, **switches: calls.append((given, switches)))
    monkeypatch.setattr(launch, "limit_programs", calls.append)
    with sweep.applied(Variant("triton", 8, 16, stream=True), CPU) as kernels:
        assert isinstance(kernels, DeviceKernels)
        switches = {"CONTIGUOUS": False, "PREFETCH": False, "EVICT": "evict_first"}
        assert calls == [((16,), {**switches, "maxnreg": sweep.MORE_REGISTERS[16]}), 8]
        assert set(launch.TUNING) == set(switches)
        calls.clear()
    assert calls == [((), {}), None]


def _row(variant, call, percent):
    spread = Spread(1.0, 1.0, 1.0)
    name = ("sweep", "a", "float32", call, f"ampfast, {variant.name}")
    return Row(*name, ms=spread, bytes=10_000 * percent, copy_gb_s=1.0)


def test_the_best_and_the_usual_are_ranked_and_profiled():
    bad, best = Variant("triton", 4), Variant("triton", loads=8)
    cuda, unfinished = Variant("cuda"), Variant("cuda", prefetch=True)
    rows = [
        _row(variant, call, percent)
        for variant, percents in {
            FIRST: (50, 80),
            bad: (1, 2),
            best: (60, 90),
            cuda: (90, 10),
        }.items()
        for call, percent in zip(("check", "unscale"), percents, strict=True)
    ]
    rows.append(_row(unfinished, "check", 100))
    table = tables.ranking(rows)
    assert [line[0].removeprefix("ampfast, ") for line in table.lines] == [
        *("triton, 16 KiB", "triton", "cuda", "triton, 4 programs")
    ]
    assert table.lines[0][1:] == ("73%", "60%", "90%")
    results = Results({}, "", None, "", None, "", rows=rows)
    assert sweep.chosen(results) == [FIRST, best, cuda]


def test_each_chosen_variant_is_profiled_once_behind_what_compiles(monkeypatch, capsys):
    calls = []

    class Recorder(TableLauncher):
        def multi_tensor(self, work, segment, epilogue):
            calls.append("unscale" if work.write else "check")
            super().multi_tensor(work, segment, epilogue)

    monkeypatch.setattr(
        sweep, "applied", lambda *_: contextlib.nullcontext(DeviceKernels(Recorder()))
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, functools.partial(calls.append, name))
    rows = [_row(v, call, 1) for v in (FIRST, Variant("cuda")) for call in sweep.PATHS]
    sweep.profile(Results({}, "", None, "", None, "", rows=rows), CPU)
    once = ["wait", "check", "unscale", "wait"]
    assert calls == 2 * [*once, "wait", "start", *once[1:], "stop"]
    told = capsys.readouterr().out.splitlines()
    assert told == [f"{name}: check and unscale of one_256m" for name in ("triton", "cuda")]


@pytest.mark.parametrize("largest", [0, 1])
def test_bulk_copies_are_timed_beside_a_plain_read(monkeypatch, largest):
    class BulkRead:
        def __call__(self, memory, size, programs, partials, stream):
            words = (ctypes.c_int32 * (size.value // 4)).from_address(memory.value)
            found = (ctypes.c_int32 * programs).from_address(partials.value)
            found[-1] = max(words) - largest

    library = type("Library", (), {"bulk_read": BulkRead()})
    properties = type("Properties", (), {"multi_processor_count": 3})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(sweep, "built", lambda source, defines, device: source)
    monkeypatch.setattr(sweep.ctypes, "CDLL", {str(sweep.BULK_SOURCE): library}.__getitem__)
    monkeypatch.setattr(torch.cuda, "current_stream", type("Stream", (), {"cuda_stream": 0}))
    monkeypatch.setattr(sweep.ceilings, "reader", lambda memory: memory.max)
    monkeypatch.setattr(providers, "available", lambda device: (["triton", "cuda"], []))
    [job] = sweep.bulk_jobs(on(HostQueue()))
    if largest:
        with pytest.raises(AssertionError, match="as maximum, not"):
            job.run()
        return
    rows = job.run().rows
    assert [(row.call, row.side) for row in rows] == [
        ("read", "torch"),
        *(("read", f"ampfast, bulk copies, {programs} programs") for programs in (1, 2, 4)),
        ("copy", "torch"),
    ]
    assert all(row.gb_s and row.subject == "bulk" for row in rows)


def test_the_library_is_called_with_the_fields_of_a_pass(monkeypatch):
    calls = []

    class Function:
        def __call__(self, *arguments):
            calls.append([getattr(each, "value", each) for each in arguments])

    class Loaded:
        sweep_launch = Function()

    monkeypatch.setattr(sweep.ctypes, "CDLL", lambda path: Loaded())
    stream = type("Stream", (), {"cuda_stream": 7})
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    tensor, factor, flag = torch.zeros(3, dtype=torch.int64), torch.ones(()), torch.zeros(())
    segment = type("Segment", (), {"dtype": torch.bfloat16, "word": 8, "chunks": 5, "partials": 9})
    table = type("Table", (), {"buffer": tensor})
    work = Pass(table, True, Use.SCALE, factor, flag, True)
    sweep.Library("a.so").multi_tensor(work, segment, Epilogue.FINISH)
    pointers = [each.data_ptr() for each in (tensor, factor, flag)]
    assert calls == [[3, pointers[0], 8, 5, 9, 1, 2, *pointers[1:], 7]]


def test_all_libraries_are_compiled_at_once_and_a_failure_is_one_line(monkeypatch, tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("""#!/bin/sh
echo "$@" >> "$0.log"
case "$*" in *VECTORS=16*) echo first; echo "error: too many"; exit 2 ;; esac
""")
    nvcc.chmod(0o755)
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(sweep, "REPOSITORY", tmp_path)
    sweep._compiler.cache_clear()
    found = dict.fromkeys(each.defines for each in sweep.variants(["cuda"]))
    paths = {sweep._compiler(sweep.SOURCE, defines, CPU)[0] for defines in found}
    assert len(paths) == 24
    for _ in range(2):  # variants share libraries
        for variant in (Variant("cuda"), Variant("cuda", 4)):
            assert sweep.built(sweep.SOURCE, variant.defines, CPU) in paths
        with pytest.raises(RuntimeError, match="nvcc: error: too many"):
            sweep.built(sweep.SOURCE, Variant("cuda", loads=16).defines, CPU)
    for defines in found:
        sweep._compiler(sweep.SOURCE, defines, CPU)[1].wait()
    lines = nvcc.with_suffix(".log").read_text().splitlines()
    assert len(lines) == 24 and all("-arch=sm_90" in line for line in lines)
    sweep._compiler.cache_clear()


@pytest.mark.sweep
@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize(
    "variant",
    # The emulator has no cache for the last switch.
    [Variant("cuda"), Variant("cuda", None, 16, contiguous=True, prefetch=True)],
    ids=lambda variant: variant.name,
)
def test_a_library_has_torchs_results(monkeypatch, variant):
    emulator = pytest.importorskip("ptx_emulator.cuda")
    from emulated import EmulatedLauncher

    flags = [flag for flag in sweep.FLAGS if flag.startswith(("-O", "--fmad", "-std"))]
    headers = [*(machine.REPOSITORY / "csrc").rglob("*.h"), *sweep.SOURCE.parent.rglob("*.cu")]
    headers += (machine.REPOSITORY / "csrc" / "cuda").glob("*.cu*")
    library = emulator.build([sweep.SOURCE], flags=[*flags, *variant.defines], headers=headers)
    library.load()
    monkeypatch.setattr(torch.cuda, "current_stream", type("Stream", (), {"cuda_stream": 0}))
    kernels = DeviceKernels(EmulatedLauncher(sweep.Library(library.path), races=False))

    def calls(scalars):
        return providers.launches(variant.name, CPU, scalars, kernels)

    gradients = [torch.rand(shape) + 0.5 for shape in ((3, 5), (0,), (7,), (1025,), (70_001,))]
    for dtype in (torch.float32, torch.bfloat16):
        decisive.assert_parity([each.to(dtype) for each in gradients], calls, sweep.PATHS)


@pytest.mark.sweep
@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_bulk_copies_compile(tmp_path):
    library, ptx = tmp_path / "bulk.so", tmp_path / "bulk.ptx"
    for flags, path in ((sweep.FLAGS, library), (["-std=c++17", "-ptx"], ptx)):
        command = [NVCC, *flags, "-arch=sm_90", str(sweep.BULK_SOURCE), "-o", str(path)]
        subprocess.run(command, check=True)
    assert "cp.async.bulk.shared" in ptx.read_text()
    exported = subprocess.run(["nm", "-D", library], capture_output=True, text=True).stdout
    assert " T bulk_read\n" in exported


def test_macros_are_those_of_the_kernels():
    sources = "".join(
        path.read_text() for path in (machine.REPOSITORY / "csrc" / "cuda").glob("*.cu*")
    )
    for define in Variant("cuda").defines:
        name = define.removeprefix("-D").partition("=")[0]
        assert f"#ifndef {name} " in sources
