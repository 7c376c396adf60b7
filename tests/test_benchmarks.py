"""The benchmarks measure what they say: fair turns, equality first, honest verdicts and files."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import subprocess
import sys

import pytest
import torch

import ampfast
from benchmarks import harness, host_time, kernels, machine, memory, readme
from benchmarks.cases import CASES, GradCase, make_gradients
from benchmarks.harness import Contender, Effort, Job, Measured
from benchmarks.results import Goal, Results, Row, Spread

CPU = torch.device("cpu")
BRIEF = Effort(quick=True, comparison_s=0.01, sample_s=0.0001)
SMALL = GradCase("small", ((3, 5), (7,), (), (0,), (1025,)))


# What the models' papers and implementations give for parameters and tensors.
@pytest.mark.parametrize(
    ("name", "elements", "tensors"),
    [
        ("1000x1k", 1_024_000, 1000),
        ("10000x256", 2_560_000, 10000),
        ("one_64m", 67_108_864, 1),
        ("resnet50", 25_557_032, 161),
        ("bert_base", 109_482_240, 199),
        ("bert_large", 335_141_888, 391),
    ],
)
def test_the_lists_have_the_sizes_of_what_they_are_named_after(name, elements, tensors):
    assert CASES[name].elements == elements
    assert len(CASES[name].shapes) == tensors
    assert CASES[name].list_bytes(torch.bfloat16) == 2 * elements


def test_halving_and_doubling_gradients_is_exact_in_every_dtype():
    for dtype in kernels.DTYPES:
        gradients = make_gradients(SMALL, dtype, CPU)
        assert [tuple(gradient.shape) for gradient in gradients] == list(SMALL.shapes)
        for gradient in gradients:
            assert torch.equal(gradient * 0.5 * 2.0, gradient)


def test_contenders_take_turns_and_every_sample_is_a_whole_number_of_cycles():
    turns = []

    def timer(contender, calls):
        turns.append((contender.provider, len(calls)))
        return {"a": 2.0, "b": 1.0}[contender.provider]

    contenders = [Contender("path", provider, lambda call: None) for provider in "ab"]
    effort = Effort(quick=True, comparison_s=0.0, sample_s=30.0)
    samples = harness.interleave(contenders, effort, cycle=4, timer=timer)

    # Each contender warms up and is tried once, which says how many cycles fill a sample.
    assert turns[:4] == [("a", 4), ("a", 4), ("b", 4), ("b", 4)]
    forwards = [("a", 16), ("b", 32)]
    assert turns[4:] == harness.MIN_ROUNDS // 2 * (forwards + forwards[::-1])
    assert samples.spread("path", "a") == Spread(2.0, 2.0, 2.0)
    assert samples.ratio(("path", "b"), ("path", "a")) == Spread(0.5, 0.5, 0.5)


def test_ratios_are_taken_within_a_round():
    samples = harness.Samples({("p", "a"): [1.0, 10.0, 100.0], ("p", "b"): [2.0, 20.0, 200.0]})
    assert samples.ratio(("p", "b"), ("p", "a")) == Spread(2.0, 2.0, 2.0)


def test_the_first_call_of_a_sample_and_its_preparation_are_not_timed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[0])

    def take(seconds):
        now[0] += seconds

    contender = Contender("p", "a", lambda call: take(9 if call == 0 else 1), lambda call: take(50))
    assert harness.time_on_host(contender, range(4)) == 1.0


def test_quantiles():
    assert Spread.of([float(value) for value in range(11)]) == Spread(2.0, 5.0, 8.0)


@pytest.mark.parametrize(
    ("sense", "limit", "p20", "p50", "p80", "spread_counts", "verdict"),
    [
        ("<=", 0.1, 0.05, 0.1, 0.2, False, "met"),
        ("<=", 0.1, 0.05, 0.11, 0.2, False, "not met"),
        ("<=", 1.0, 0.99, 1.01, 1.2, True, "met within spread"),
        ("<=", 1.0, 1.01, 1.02, 1.2, True, "not met"),
        ("<=", 1.0, 0.50, 1.06, 2.0, True, "not met"),
        (">=", 1.0, 0.9, 0.99, 1.0, True, "met within spread"),
        (">=", 1.0, 0.5, 0.94, 2.0, True, "not met"),
        (">=", 1.0, 0.9, 0.98, 0.99, True, "not met"),
        (">=", 2.5, 2.4, 2.5, 2.6, False, "met"),
        (">=", 2.5, 2.3, 2.4, 2.6, False, "not met"),
        ("<", 64, 63, 64, 65, False, "not met"),
    ],
)
def test_a_goal_is_met_only_where_the_median_or_a_spread_that_counts_reaches_it(
    sense, limit, p20, p50, p80, spread_counts, verdict
):
    spread = Spread(p20, p50, p80)
    goal = Goal.of_spread("name", "case", "float32", sense, limit, spread, spread_counts)
    assert goal.verdict == verdict
    assert goal.as_json()["met"] is (verdict != "not met")


def test_equality_takes_nan_for_nan_and_nothing_else():
    same = [torch.tensor([1.0, math.nan]), torch.tensor(math.inf)]
    harness.assert_same(same, [tensor.clone() for tensor in same], "same")
    with pytest.raises(AssertionError, match="bits, tensor 1"):
        harness.assert_same(same, [same[0], torch.tensor(3.0)], "bits")
    close = torch.tensor([1.0])
    with pytest.raises(AssertionError):
        harness.assert_same([close], [torch.nextafter(close, 2 * close)], "one ulp")
    with pytest.raises(ValueError, match="zip"):
        harness.assert_same(same, same[:1], "length")


@pytest.fixture
def small_cache(monkeypatch):
    """With a small cache few lists are enough to overflow it."""
    monkeypatch.setattr(kernels, "cache_bytes", lambda: 1 << 13)


@pytest.mark.usefixtures("small_cache")
@pytest.mark.parametrize("dtype", kernels.DTYPES, ids=str)
def test_kernels_yield_a_row_for_each_contender(dtype):
    measured = kernels.measure(SMALL, dtype, CPU, BRIEF)
    paths = ["unscale", "unscale", "check", "copy"]
    assert [row.path for row in measured.rows] == paths + paths
    assert len({row.provider for row in measured.rows}) == 2
    list_bytes = SMALL.elements * dtype.itemsize
    # By itself, and so many in turn that they overflow the cache.
    rotation = math.ceil(2 * (1 << 13) / list_bytes)
    assert [row.lists for row in measured.rows] == 4 * [1] + 4 * [rotation]
    moved = [factor * list_bytes for factor in (2, 2, 1, 2)]
    assert [row.bytes for row in measured.rows] == moved + moved
    for row in measured.rows:
        assert row.ms_p20 <= row.ms_p50 <= row.ms_p80
        assert row.gb_s == pytest.approx(row.bytes / row.ms_p50 / 1e6)
        # Not measured on a CPU.
        assert row.launches is row.syncs is row.host_us_p50 is None
    assert measured.rows[3].percent_of_copy == pytest.approx(100)
    assert [goal.case for goal in measured.goals] == ["small", "small, cold"]


def _does_nothing(gradients, found_inf, inv_scale):
    pass


def _never_finds(gradients, found_inf, inv_scale):
    torch._foreach_mul_(gradients, inv_scale)


def _one_ulp_off(gradients, found_inf, inv_scale):
    inv_scale = torch.nextafter(inv_scale, inv_scale + 1)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)


@pytest.mark.parametrize("wrong", [_does_nothing, _never_finds, _one_ulp_off])
def test_a_wrong_unscale_is_not_timed(monkeypatch, wrong):
    monkeypatch.setattr(kernels.functional, "unscale_", wrong)
    with pytest.raises(AssertionError, match="small float32"):
        kernels.measure(SMALL, torch.float32, CPU, BRIEF)


def test_a_check_that_writes_is_not_timed(monkeypatch):
    def halves(gradients, found_inf):
        kernels.torch._amp_foreach_non_finite_check_and_unscale_(
            gradients, found_inf, torch.tensor(0.5)
        )

    monkeypatch.setattr(kernels.functional, "check_", halves)
    with pytest.raises(AssertionError, match="small float32"):
        kernels.measure(SMALL, torch.float32, CPU, BRIEF)


@pytest.mark.usefixtures("small_cache")
def test_gradients_that_drift_are_not_reported(monkeypatch):
    def halves_when_timed(gradients, found_inf, inv_scale):
        inv_scale = torch.clamp(inv_scale, max=0.5)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)

    # Equal to torch in the parity test, whose inverse scale is smaller.
    monkeypatch.setattr(kernels.functional, "unscale_", halves_when_timed)
    with pytest.raises(AssertionError, match="drifted"):
        kernels.measure(SMALL, torch.float32, CPU, BRIEF)


def test_lists_that_do_not_fit_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr(kernels, "available_bytes", lambda: 1 << 20)
    monkeypatch.setattr(kernels, "make_gradients", lambda *arguments: pytest.fail("was made"))
    with pytest.raises(MemoryError, match="1 MiB are available"):
        kernels.measure(CASES["one_64m"], torch.float32, CPU, BRIEF)


@pytest.mark.parametrize(
    "paths",
    [
        (host_time.UNSCALE,),
        (host_time.STEP, "step_and_update"),
        (host_time.FUSED, "step_and_update, fused"),
    ],
    ids=lambda paths: paths[0],
)
def test_host_time_compares_each_path_with_the_calls_it_replaces(paths):
    measured = host_time.measure(10, paths, CPU, BRIEF)
    assert [row.path for row in measured.rows] == [paths[0], *paths]
    assert measured.rows[0].provider == "torch"
    assert measured.rows[0].vs_torch is None
    for row in measured.rows:
        assert row.host_us_p50 == pytest.approx(1e3 * row.ms_p50)
    for row in measured.rows[1:]:
        assert row.provider == ampfast.backends.default_for(CPU)
        assert row.vs_torch > 0
    assert [goal.limit for goal in measured.goals] == ([1.0] if len(paths) == 1 else [])


def test_a_scaler_that_unscales_twice_is_not_timed(monkeypatch):
    class Twice(torch.amp.GradScaler):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    monkeypatch.setattr(ampfast, "GradScaler", Twice)
    with pytest.raises(AssertionError, match="over 10 parameters, without an infinity"):
        host_time.measure(10, (host_time.UNSCALE,), CPU, BRIEF)


def test_memory_sees_a_copy_and_only_a_copy():
    # So large that the memory of a copy comes from the system and goes back to it.
    gradients = [torch.ones(1 << 24) for _ in range(2)]
    largest = gradients[0].nbytes
    nothing = memory.usage_of_call(lambda gradients: gradients[0].mul_(2), gradients)
    assert nothing.list_bytes == 2 * largest
    assert nothing.allocated_bytes < 4096
    # One copy at a time is alive, so the peak is the size of one.
    copies = memory.usage_of_call(
        lambda gradients: [(g + 1)[0].item() for g in gradients], gradients
    )
    assert largest <= copies.allocated_bytes < 2 * largest
    if memory.CLEAR_REFS.exists():
        assert nothing.extra_bytes < largest / 2 < copies.extra_bytes


def test_the_table_is_measured_per_chunk():
    measured = memory.measure_table("1000x1k")
    assert measured.rows[0].chunks >= 1000
    assert measured.goals[0].ratio == measured.rows[0].table_bytes / measured.rows[0].chunks > 0


def _results(**changes):
    results = Results(
        machine={"cpu": "a cpu", "cores": 2, "threads": 1, "load": 0.0},
        torch="2.99",
        triton=None,
        ampfast="0.0",
        commit="abc",
        date="2030-01-02T03:04:05+00:00",
        rows=[
            Row("host", "10x4", "float32", host_time.UNSCALE, "torch", host_us_p50=20.0),
            Row(
                "host",
                "10x4",
                "float32",
                host_time.UNSCALE,
                "cpu",
                host_us_p50=5.0,
                vs_torch=4.1,
            ),
            Row("kernels", "1000x1k", "float16", "unscale", "torch", ms_p50=1.5),
            Row(
                "kernels",
                "1000x1k",
                "float16",
                "unscale",
                "cpu",
                ms_p50=0.5,
                vs_torch=3.02,
            ),
        ],
        goals=[Goal("faster", "1000x1k", "float16", ">=", 2.5, 3.02, 2.9, 3.1)],
    )
    return dataclasses.replace(results, **changes)


def test_a_json_file_reads_back_as_it_was_and_names_what_was_not_measured(tmp_path):
    path = tmp_path / "results.json"
    _results().write_json(path)
    assert Results.read_json(path) == _results()
    content = json.loads(path.read_text())
    assert content["rows"][0]["ms_p50"] is None
    assert content["goals"][0]["met"] is True
    assert content["goals"][0]["ratio"] == 3.02


def test_a_csv_file_has_a_line_for_each_row(tmp_path):
    path = tmp_path / "results.csv"
    _results().write_csv(path)
    lines = list(csv.DictReader(path.read_text().splitlines()))
    assert [line["host_us_p50"] for line in lines] == ["20.0", "5.0", "", ""]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"speed": 1}], "goals": []}'])
def test_a_file_that_is_not_a_result_is_named(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is not a result"):
        Results.read_json(path)


def test_the_section_shows_figures_of_the_file_and_says_what_was_not_measured(tmp_path):
    path = tmp_path / "results.json"
    _results().write_json(path)
    section = readme.markdown(path)
    assert "a cpu (2 cores, threads: 1) with torch 2.99, commit abc, 2030-01-02." in section
    assert "| 10 | unscale_ + update | 20.0 | 5.0 | 4.1x |" in section
    not_measured = "not measured | not measured | not measured |"
    assert f"| 1000x1k | float16 | 1.500 | 0.500 | 3.02x | {not_measured}" in section
    assert "On GPUs: not measured." in section
    assert "not complete" not in section
    _results(complete=False).write_json(path)
    assert "The run was not complete." in readme.markdown(path)


def test_only_what_stands_between_the_markers_is_replaced(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{readme.START}\nold\n{readme.END}\nafter\n")
    readme.write(page, "new\n")
    readme.write(page, "newer\n")
    assert page.read_text() == f"before\n{readme.START}\nnewer\n{readme.END}\nafter\n"
    assert readme.section_of(page) == "newer\n"


@pytest.mark.parametrize("text", ["", readme.START, readme.END + readme.START, 2 * readme.START])
def test_a_page_without_the_markers_is_left_alone(tmp_path, text):
    page = tmp_path / "README.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="must contain"):
        readme.write(page, "new\n")
    assert page.read_text() == text


def test_the_readme_agrees_with_the_result_that_it_names():
    page = machine.REPOSITORY / "README.md"
    if not page.exists() or readme.START not in page.read_text():
        pytest.skip("README.md has no performance section")
    section = readme.section_of(page)
    if not section:
        pytest.skip("the performance section of README.md is empty")
    named = [
        path
        for path in (machine.REPOSITORY / "benchmarks/results").glob("*.json")
        if f"({path.relative_to(machine.REPOSITORY).as_posix()})" in section
    ]
    assert len(named) == 1, "the section must name one file of benchmarks/results"
    assert section == readme.markdown(named[0])


@pytest.fixture
def command():
    """The command line, run in this process."""
    pytest.importorskip("rich", reason="the tables are drawn by rich")
    from benchmarks import __main__ as command_line

    return command_line


def _job(result):
    def run():
        if isinstance(result, BaseException):
            raise result
        return Measured([Row("host", result, "float32", "path", "torch")])

    return Job("a job", run)


@pytest.mark.parametrize(
    ("middle", "kept", "complete", "exit_code"),
    [
        ("second", ["first", "second", "third"], True, 0),
        (KeyboardInterrupt(), ["first"], False, 130),
        (AssertionError("not torch's [bits]"), ["first", "third"], False, 1),
        (MemoryError("too large"), ["first", "third"], False, 0),
    ],
    ids=["all", "Ctrl-C", "wrong", "no memory"],
)
def test_what_was_measured_is_kept_whatever_happens(
    command, monkeypatch, tmp_path, capsys, middle, kept, complete, exit_code
):
    jobs = [_job("first"), _job(middle), _job("third")]
    monkeypatch.setattr(command.host_time, "jobs", lambda effort: jobs)
    path = tmp_path / "results.json"
    assert command.main(["--only", "host", "--json", str(path)]) == exit_code
    results = Results.read_json(path)
    assert [row.case for row in results.rows] == kept
    assert results.complete is complete
    if isinstance(middle, Exception):
        assert str(middle) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "host,gpu"], "'gpu' is not among host, kernels, memory"),
        (["--cases", "1000x2k"], "'1000x2k' is not among"),
        (["--threads", "0"], "must be at least 1"),
        (["--json", "missing/directory/file"], "is not a directory"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(
    command, capsys, arguments, message
):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_readme_command_prints_or_writes_the_section(command, tmp_path, capsys):
    path = tmp_path / "results.json"
    page = tmp_path / "README.md"
    page.write_text(f"{readme.START}{readme.END}")
    _results().write_json(path)
    assert command.main(["readme", str(path)]) == 0
    assert capsys.readouterr().out == readme.markdown(path)
    assert command.main(["readme", str(path), "--write", str(page)]) == 0
    assert readme.section_of(page) == readme.markdown(path)
    assert command.main(["readme", str(tmp_path / "missing.json")]) == 1
    assert "missing.json" in capsys.readouterr().err


def test_memory_is_measured_in_a_process_of_its_own():
    command = [sys.executable, "-m", "benchmarks.memory", "1000x1k", "check", "ampfast"]
    done = subprocess.run(command, cwd=machine.REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["list_bytes"] == 4096 * 1000
