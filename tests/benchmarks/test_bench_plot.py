"""Pictures of a run: lengths, marks and positions follow the result file, byte for byte."""

from __future__ import annotations

import dataclasses
import math
import xml.etree.ElementTree as ElementTree

import pytest
from sample_results import cpu_results, gpu_results, training_results

from benchmarks import plot, svg
from benchmarks.svg import Bar, Curve, Group

NAMESPACE = "{http://www.w3.org/2000/svg}"
TONES = {"torch": 0, "ours": 1}


def _drawn(picture, tag, kind=None):
    """Attributes of the elements of one class in a picture, as numbers where they are."""
    root = ElementTree.fromstring(picture.file())
    found = [e for e in root.iter(NAMESPACE + tag) if kind in (None, e.get("class"))]
    return [{key: _value(value) for key, value in e.attrib.items()} for e in found]


def _value(text):
    try:
        return float(text)
    except ValueError:
        return text


def _texts(picture):
    return [e.text for e in ElementTree.fromstring(picture.file()).iter(NAMESPACE + "text")]


def _bars(values, **more):
    groups = [
        Group(name, (Bar("torch", a, f"{a:g}"), Bar("ours", b, f"{b:g}")), mark)
        for name, a, b, mark in values
    ]
    return svg.bars("name", "Title", "what", "seconds", groups, TONES, **more)


def test_bars_are_as_long_as_their_values():
    picture = _bars([("one", 10.0, 5.0, 20.0), ("two", 40.0, 0.0, None)], limit=10.0)
    lengths = [bar["width"] for tone in "01" for bar in _drawn(picture, "rect", f"t{tone}")]
    lengths = [length for length in lengths if length != 8.0]  # without the legend's
    unit = lengths[0] / 10
    assert lengths == pytest.approx([10 * unit, 40 * unit, 5 * unit, 0], abs=0.1)
    left = _drawn(picture, "rect", "t0")[0]["x"]
    (mark,) = [line for line in _drawn(picture, "line", "mark") if line["x1"] > left]
    (limit,) = _drawn(picture, "line", "limit")
    assert mark["x1"] - left == pytest.approx(20 * unit, abs=0.2)
    assert limit["x1"] - left == pytest.approx(10 * unit, abs=0.2)
    # The axis agrees.
    ticks = {line["x1"] for line in _drawn(picture, "line", "grid")}
    assert sorted(ticks) == pytest.approx([left + unit * n for n in range(0, 41, 10)], abs=0.2)


def test_points_of_curves_are_placed_by_their_logarithms():
    curves = [Curve("torch", ((10, 0.1), (100, 1.0), (1000, 100.0))), Curve("ours", ((10, 0.1),))]
    picture = svg.curves("name", "Title", "what", ("tensors", "ms"), curves, TONES)
    _, *points = [(p["cx"], p["cy"]) for p in _drawn(picture, "circle")]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y1 - y2 == pytest.approx(2 * (y0 - y1), abs=0.2)
    (square,) = _drawn(picture, "rect", "t1")[1:]
    assert (square["x"] + 4, square["y"] + 4) == pytest.approx((x0, y0), abs=0.1)
    assert {"10", "100", "1,000", "0.1", "1", "tensors", "ms"} <= set(_texts(picture))


@pytest.mark.parametrize("largest", [1e-7, 0.3, 1.0, 7.0, 99.0, 100.0, 101.0, 873.0, 4.2e9])
def test_an_axis_has_few_round_ticks_and_reaches_the_largest(largest):
    ticks = svg._linear_ticks(largest)
    assert 3 <= len(ticks) <= 7
    assert ticks[-2] < largest <= ticks[-1] * (1 + 1e-9)
    step = ticks[1] / 10 ** math.floor(math.log10(ticks[1]) + 1e-9)
    assert round(step, 9) in (1, 2, 5, 10)


def test_a_value_stands_clear_of_the_mark():
    picture = _bars([("one", 10.0, 5.0, 10.2)])
    (mark,) = [line for line in _drawn(picture, "line", "mark") if line["y1"] > svg.HEAD - 1]
    ten, five = _drawn(picture, "text", "value")
    assert ten["x"] > mark["x1"]
    assert five["x"] < mark["x1"]


def _pictures():
    for results in (gpu_results(), cpu_results(), training_results()):
        for found in plot.pictures(results).values():
            yield from found


def test_nothing_leaves_the_picture():
    for picture in _pictures():
        for text in _drawn(picture, "text"):
            assert 0 <= text["x"] <= svg.WIDTH
            assert 0 <= text["y"] <= picture.height
        for bar in _drawn(picture, "rect"):
            assert bar.get("x", 0) + bar["width"] <= svg.WIDTH


def test_the_same_results_give_the_same_bytes():
    assert [p.file() for p in _pictures()] == [p.file() for p in _pictures()]


def test_kernels_have_a_picture_for_each_path_and_dtype():
    results = gpu_results()
    results.rows += [dataclasses.replace(row, dtype="float16") for row in results.rows]
    kernels = plot.pictures(results)["kernels"]
    assert [picture.name for picture in kernels] == [
        *("unscale-float32", "unscale-float16", "check-float32", "check-float16")
    ]
    texts = _texts(kernels[0])
    assert {"1000x1k, cold", "gpt2_xl", "torch", "ampfast, triton", "ampfast, cuda"} <= set(texts)
    assert texts.count("90%") == 2
    marks = [line for line in _drawn(kernels[0], "line", "mark") if line["y1"] > svg.HEAD - 1]
    assert len(marks) == 2


def test_rows_without_a_scaler_are_not_torchs():
    (mlp,), (training,) = (plot.pictures(training_results())[name] for name in ("mlp", "training"))
    assert "1.250" in _texts(mlp) and "1.020" in _texts(training)
    tones = svg.tones_of(["no scaler", "ampfast", "torch", "ampfast"], plot.TONES)
    assert list(tones) == ["no scaler", "ampfast", "torch"]
    assert len(set(tones.values())) == 3


def test_no_two_series_look_alike_while_there_are_colours():
    for series in (["a", "b", "c", "d", "e"], ["torch", "a", "b", "c", "d"]):
        assert len(set(svg.tones_of(series, plot.TONES).values())) == svg.TONES


def test_growth_has_a_curve_for_each_provider_by_tensors_and_by_elements():
    tensors, elements = plot.pictures(training_results())["growth"]
    assert (tensors.name, elements.name) == ("growth-tensors", "growth-elements")
    assert [len(line["points"].split()) for line in _drawn(tensors, "polyline")] == [3, 3]
    assert [len(line["points"].split()) for line in _drawn(elements, "polyline")] == [2, 2]
    assert "torch from 0.01 ms at 10 to 1 ms at 1,000; ampfast from" in tensors.description


def test_texts_of_a_file_are_no_markup():
    rows = [dataclasses.replace(row, case='<&">') for row in gpu_results().rows]
    for picture in plot.pictures(gpu_results(rows=rows))["kernels"]:
        assert '<&">' in " ".join(_texts(picture))


def test_the_kernels_are_drawn_as_one_picture(tmp_path):
    path = tmp_path / "kernels.svg"
    plot.draw(gpu_results(complete=False), path)
    text = path.read_text()
    root = ElementTree.fromstring(text)
    assert len(root.findall(f"{NAMESPACE}g")) == 2
    assert "a gpu (driver 1.2)" in text and "(the run was not complete)" in text


def test_without_kernels_nothing_is_drawn(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        plot.draw(cpu_results(rows=[]), tmp_path / "picture.svg")
