"""Tables, sentences, pictures and page of results."""

from __future__ import annotations

import dataclasses
import html
import re

import pytest
from sample_results import both, cpu_results, gpu_results, results, spread

from benchmarks import goals, machine, pictures, report, tables
from benchmarks.results import Results, Row, Spread


def _tables(made):
    return {table.subject: table for table in tables.of(made)}


def test_both_sides_of_a_call_stand_on_one_line():
    found = _tables(cpu_results())
    assert list(found) == ["loops", "host", "clip", "training", "growth", "kernels", "masters"]
    clip = found["clip"]
    assert clip.header == ("case", "dtype", "call", "torch, ms", "ampfast, ms", "faster", "spread")
    assert clip.lines == [
        ("bert_base", "float32", "clip", "4", "2", "2.00x", "±10%"),
        ("bert_base", "float32", "clip, in_place=False", "4", "2", "8.00x", "±10%"),
    ]
    kernels = found["kernels"]
    assert [line[2] for line in kernels.lines] == ["unscale"], "a copy has no line of its own"
    assert dict(zip(kernels.header, kernels.lines[0], strict=True))["of a copy"] == "80%"
    training = dict(zip(found["training"].header, found["training"].lines[0], strict=True))
    assert training["no scaler, ms"] == "10"
    assert (training["torch, over none"], training["ampfast, over none"]) == ("1.250", "1.000")
    masters = found["masters"]
    assert masters.header[3:6] == ("a loop, ms", "torch, ms", "ampfast, ms")
    assert [line[3:6] for line in masters.lines] == [("8", "4", "1")]


def test_backends_of_a_gpu_have_lines_of_their_own():
    (table,) = tables.of(gpu_results())
    assert [line[3] for line in table.lines] == ["ampfast, triton", "ampfast, cuda"]
    line = dict(zip(table.header, table.lines[0], strict=True))
    assert (line["torch, kernels"], line["ampfast, kernels"]) == ("3", "1")
    assert (line["torch, us"], line["torch, ms"], line["ampfast, syncs"]) == ("20", "1", "0")


def test_an_unknown_subject_has_a_table_too():
    (table,) = tables.of(results([Row("news", "a", "b", "c", "torch", ms=Spread(1, 2, 3))]))
    assert (table.title, table.lines) == ("news", [("a", "b", "c", "2", "±50%")])


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (0.0043, "0.0043"), (0.5, "0.50"), (12.34, "12.3"), (1234, "1,234")],
)
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert tables.number(value) == text


def test_three_sentences_name_both_sides_and_their_ratio():
    assert tables.sentences(cpu_results()) == [
        "Scaler's own time in a real training loop: 130 us with torch, 50 us with ampfast, 2.60x "
        "faster (conv net, 10 parameters, bfloat16, AdamW); over all 3 rows 1.25x to 2.60x.",
        "Host time of warm calls: 800 us with torch, 80 us with ampfast, 10.00x faster (1000x4, "
        "float32, unscale_ + update); over all 1 rows 10.00x to 10.00x.",
        "Throughput: 4 GB/s with torch, 8 GB/s with ampfast, 2.00x faster (bert_base, float32, "
        "unscale); over all 1 rows 2.00x to 2.00x.",
    ]
    assert all(sentence.endswith(": not measured.") for sentence in tables.sentences(results([])))
    bare = [dataclasses.replace(row, vs_torch=None) for row in cpu_results().rows]
    assert all(each.endswith(": not measured.") for each in tables.sentences(results(bare)))


def test_what_is_slower_is_called_so():
    assert [tables.times(value) for value in (2.0, 0.998, 0.5)] == [
        "2.00x",
        "1.00x",
        "2.00x slower",
    ]
    assert tables.faster(1.5) == "1.50x faster"
    slow = [row for row in both("host", "a", "float32", "unscale", 10.0, 25.0) if row.vs_torch]
    assert pictures._timed(slow[0], "").label.endswith(" (2.50x slower)")


def test_score_counts_what_is_won_tied_and_lost():
    rows = [
        row
        for ours in (5.0, 9.6, 10.0, 10.4, 12.0, 20.0)
        for row in both("host", f"{ours}", "float32", "unscale", 10.0, ours)
    ]
    assert tables.score(results(rows)) == (
        "Against torch, of 6 measurements: 1 faster, 3 as fast within 5%, 2 slower."
    )
    assert tables.score(results([])) == "Against torch: not measured."


def test_bars_have_their_spread(tmp_path):
    [_, ours] = [row for row in cpu_results().rows if row.subject == "loops"][:2]
    bar = pictures._own_time(ours)
    assert bar.spread == (ours.host_us.p20, ours.host_us.p80)
    [clip] = [row for row in cpu_results().rows if row.subject == "clip" and row.vs_torch][:1]
    low, high = pictures._speedup(clip).spread
    assert low < clip.vs_torch < high
    assert low == clip.vs_torch * clip.ms.p50 / clip.ms.p80


def test_busy_machine_is_told(tmp_path):
    made = cpu_results()
    made.machine = {**made.machine, "cores": 2, "cores_of_others": 0.1}
    assert made.during == "Other programs took 0.10 of 2 cores."
    assert not any("BUSY" in caveat for caveat in made.caveats)
    assert made.during in report.write(made, tmp_path).read_text()
    made.machine["cores_of_others"] = 0.9
    assert any("BUSY: do not trust the times" in caveat for caveat in made.caveats)


def test_cores_of_others_are_without_our_own(monkeypatch):
    seconds = iter([(100.0, 10.0, 0.0), (160.0, 50.0, 40.0), (None, 0.0, 99.0)])
    monkeypatch.setattr(machine.OtherPrograms, "_seconds", staticmethod(lambda: next(seconds)))
    others = machine.OtherPrograms()
    assert others.cores() == 0.5
    assert others.cores() is None


def test_a_step_gains_what_torchs_takes_longer():
    rows = [
        *both("training", "a", "bfloat16", "SGD", 100.0, 95.0),
        *both("training", "b", "bfloat16", "SGD", 99.0, 100.0),
    ]
    told = tables.gain_of_a_step(results(rows))
    assert told == (
        "On the nets measured (a; b), the import alone makes a whole training step 2.0% shorter "
        "than with torch's scaler: the median of 2 kinds of step, between 1.0% longer and 5.0% "
        "shorter."
    )
    # Clipping by the scaler is another call than torch's.
    other = dataclasses.replace(rows[1], call="SGD, clip by the scaler", vs_torch=2.0)
    assert tables.gain_of_a_step(results([*rows, other])) == told
    assert "not measured" in tables.gain_of_a_step(results([]))


def test_goals_that_were_not_met_come_first():
    (met,) = cpu_results().goals
    missed = dataclasses.replace(met, ratio=Spread(0.6, 0.7, 0.8))
    table = tables.of_goals([met, missed])
    assert [line[0] for line in table.lines] == ["not met", "met"]
    assert table.lines[0][1:] == (
        *("loops", "conv net", "bfloat16", "AdamW", "ampfast", "AdamW, torch"),
        *("0.5", "0.7", "0.6 to 0.8"),
    )


def test_goals_are_no_caveat_and_each_kind_is_explained(tmp_path):
    made = cpu_results()
    made.goals = [dataclasses.replace(made.goals[0], ratio=Spread(0.6, 0.7, 0.8))]
    assert made.caveats == []
    text = report.write(made, tmp_path).read_text()
    explained = text.index(
        f"<dd>{html.escape(goals.KINDS['loops']).replace('&#x27;', '&#39;')}</dd>"
    )
    assert text.index("<h2>Goals") < explained < text.index('id="goals"')
    assert "not met" not in text[: text.index("<h2>Goals")]
    for path in (machine.REPOSITORY / "benchmarks/results").glob("*.json"):
        assert {goal.subject for goal in Results.read(path).goals} <= set(goals.KINDS)
    assert set(goals.KINDS) <= set(tables.SUBJECTS)


def test_a_row_is_read_aloud():
    found = {subject: table.example for subject, table in _tables(cpu_results()).items()}
    assert found["loops"] == (
        "For example, conv net, bfloat16, AdamW: torch 130 us, ampfast 50 us, so ampfast is 2.60x "
        "faster."
    )
    assert found["training"] == (
        "For example, gpt2, bfloat16, AdamW: no scaler 10 ms, torch 12.5 ms, ampfast 10 ms, so "
        "ampfast is 1.25x faster."
    )
    slow = both("host", "a", "float32", "unscale", 10.0, 25.0)
    assert tables.of(results(slow))[0].example.endswith(", so ampfast is 2.50x slower.")
    track = Row("tracking", "a", "b", "check, overflow", "ampfast", ms=spread(2.0), over_none=1.1)
    alone = dataclasses.replace(track, call="check", over_none=None)
    (table,) = tables.of(results([alone, track]))
    assert table.example == (
        "For example, a, b, check, overflow: ampfast 2 ms, that is 1.100 of the time without."
    )
    assert tables.of_goals(cpu_results().goals).example == (
        "For example, loops, conv net, bfloat16, AdamW, ampfast: it was to take at most 0.5 times "
        "as long as AdamW, torch, and took 0.4."
    )
    assert tables.of_goals([]).example == ""


def test_clipping_by_the_scaler_stands_beside_the_step_without_one():
    rows = [
        Row("training", "a", "b", "SGD, clip", "no scaler", ms=spread(10.0)),
        *both("training", "a", "b", "SGD, clip", 12.0, 11.0),
    ]
    call = {"call": "SGD, clip by the scaler", "replaces": "SGD, clip"}
    (table,) = tables.of(results([*rows, dataclasses.replace(rows[-1], **call)]))
    assert [line[2:6] for line in table.lines] == [
        ("SGD, clip", "10", "12", "11"),
        ("SGD, clip by the scaler", "10", "12", "11"),
    ]


def test_pictures_show_what_was_measured():
    drawn = pictures.draw(cpu_results())
    assert list(drawn) == ["loops", "host", "throughput", "training", "clip", "growth"]
    assert pictures.draw(results([])) == {}
    (axes,) = drawn["loops"].axes
    lengths = [bar.get_width() for bar in axes.patches][:6]
    assert lengths == [130.0, 50.0, 200.0, 80.0, 100.0, 80.0]
    (axes,) = drawn["growth"].axes
    curves = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert curves == {"torch": [10, 100], "ampfast": [1.0, 1.0]}
    text = pictures.svg(drawn["loops"])
    assert "Scaler's own time in training loops" in text
    assert pictures.svg(pictures.draw(cpu_results())["loops"]) == text


def test_pictures_are_written_in_both_forms_and_earlier_ones_go_away(tmp_path):
    (tmp_path / "old.svg").touch()
    (tmp_path / "kept.txt").touch()
    pictures.write(pictures.draw(results(cpu_results().rows[:2])), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"loops.svg", "loops.png", "kept.txt"}


def test_the_page_opens_with_sentences_and_pictures_and_folds_tables(tmp_path):
    made = cpu_results(complete=False, notes=["FAILED <b>: torch's bits"])
    text = report.write(made, tmp_path).read_text()
    parts = ("Against torch, of ", "2.60x faster (conv net", "data:image", "<details", "<table>")
    places = [text.index(part) for part in (*parts, "<h2>Goals", 'id="goals"')]
    assert places == sorted(places)
    assert "The run was not complete; its notes say why." in text
    assert "1 of its parts failed." in text
    assert "FAILED &lt;b&gt;: torch&#39;s bits" in text
    assert "All of them: 1 met, 0 met within spread, 0 not met." in text
    assert "<dt>loops: 1 met, 0 met within spread, 0 not met</dt>" in text
    assert not re.search(r"https?://", text), "nothing is fetched"
    for table in tables.of(made):
        assert f'<details id="{table.subject}">' in text
    assert {path.name for path in tmp_path.iterdir()} == {report.PAGE, report.PLOTS}
