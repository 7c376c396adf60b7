"""Page of a run: self-contained, valid HTML, accessible, and open about what is missing."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest
from sample_results import cpu_results, gpu_results, training_results

from benchmarks import page, readme, svg
from benchmarks.results import Row

VOID = {"meta", "br", "rect", "line", "circle", "polyline", "polygon"}


class Reader(HTMLParser):
    """HTML parser that checks nesting and records elements with attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.texts = []
        self._open = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag in VOID
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" not in self._open:
            self.texts.append(data.strip())

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def both():
    """Page of two runs, and its parsed form."""
    text = page.html([gpu_results(complete=False, notes=["left out"]), training_results()])
    return text, Reader(text)


def test_nothing_is_fetched_or_run(both):
    text, reader = both
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in reader.elements}
    assert "url(" not in text and "@import" not in text
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not any({"src", "onclick", "onload"} & set(of) for _, of in reader.elements)


def test_links_lead_to_sections_of_their_own_run(both):
    _, reader = both
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    links = [attributes["href"] for attributes in reader.all("a")]
    assert {link[1:] for link in links} == set(ids)
    assert {"run1-kernels", "run2-growth", "method"} <= set(ids)


def test_tables_and_pictures_can_be_read_aloud(both):
    text, reader = both
    tables = len(reader.all("table"))
    assert tables == len(reader.all("caption")) > 6
    assert all(cell.get("scope") in ("col", "row") for cell in reader.all("th"))
    assert len(re.findall(r'<tr[^>]*><th scope="row">', text)) == len(reader.all("tr")) - (
        len(reader.all("thead"))
    )
    for drawn in reader.all("svg"):
        assert drawn["role"] == "img"
        assert len(drawn["aria-label"]) > 40
    assert reader.all("html")[0]["lang"] == "en"
    assert reader.all("meta")[1]["content"].startswith("width=device-width")


def test_every_row_is_shown_and_missing_ones_are_listed(both):
    text, reader = both
    rows = [*gpu_results().rows, *training_results().rows]
    inside = text.count("</tr>")
    assert inside > len(rows)
    assert reader.texts.count("Not complete.") == 1
    assert "left out" in reader.texts
    assert "Nothing was left out." in reader.texts


def test_in_short_has_the_range_of_each_ratio(both):
    _, reader = both
    place = reader.texts.index("Time over that of the same without a scaler (less is better)")
    words = [text for text in reader.texts[place:] if text]
    torchs = words.index("AdamW, clip")
    assert words[torchs - 1 : torchs + 6] == [
        "training",
        "AdamW, clip",
        "torch",
        "1",
        *3 * ["1.250"],
    ]
    place = words.index("Times as fast as torch, over all lists and dtypes (more is better)")
    growth = words.index("by tensors", place)
    assert words[growth - 1 : growth + 6] == ["growth", "by tensors", "cpu", "3", *3 * ["10.00x"]]
    assert (
        "none" not in words[place : words.index("A perceptron in mixed precision, epochs", place)]
    )


def test_goals_have_verdicts_in_words_and_those_not_met_come_first():
    met = cpu_results().goals[0]
    missed = dataclasses.replace(met, name="slow", ratio=1.0, ratio_p80=1.1)
    reader = Reader(page.html([cpu_results(goals=[met, missed])]))
    verdicts = [text for text in reader.texts if text in ("✓ met", "✗ not met")]
    assert verdicts[-2:] == ["✗ not met", "✓ met"]
    assert reader.texts.index("slow") < reader.texts.index("faster")


def test_texts_of_a_file_are_escaped():
    evil = '<b onload="x">&'
    rows = [Row(evil, evil, evil, evil, "torch", ms_p50=1.0, vs_torch=2.0, over_none=1.0)]
    results = cpu_results(rows=rows, notes=[evil], machine={"cpu": evil, evil: evil}, commit=evil)
    reader = Reader(page.html([results]))
    assert not reader.all("b") or all("onload" not in of for of in reader.all("b"))
    assert evil in reader.texts


@pytest.mark.parametrize(("load", "shown"), [(0.5, False), (22.44, True), (None, False)])
def test_other_processes_are_reported(tmp_path, load, shown):
    results = cpu_results(machine={**cpu_results().machine, "load": load})
    sentence = "The load was 22.4 before it began: other processes disturb timings."
    assert (sentence in page.html([results])) is shown
    results.write_json(tmp_path / "run.json")
    assert (sentence in readme.WHOLE.section(tmp_path / "run.json")) is shown


def test_results_without_anything_still_make_a_page():
    reader = Reader(page.html([cpu_results(rows=[], goals=[], machine={}, complete=False)]))
    assert "Not complete." in reader.texts


def _colours(text):
    return dict(re.findall(r"--(\w+):#(\w{6})", text))


def _contrast(first, second):
    """Contrast ratio as WCAG 2 defines it."""

    def luminance(colour):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_contrast_with_the_page(both, scheme):
    text, _ = both
    light, dark = re.findall(r":root\{([^}]*)\}", text)[:2]
    colours = _colours(light if scheme == "light" else dark)
    for name in ("ink", "soft", "met", "near", "missed", "tone1"):
        for paper in ("paper", "raised"):
            assert _contrast(colours[name], colours[paper]) >= 4.5, name
    for tone in range(svg.TONES):
        assert _contrast(colours[f"tone{tone}"], colours["paper"]) >= 3.0, tone


def test_a_printed_page_is_light():
    text = page.html([cpu_results()])
    printed = text.partition("@media print")[2]
    assert _colours(printed)["paper"] == "ffffff"
    assert text.index("prefers-color-scheme:dark") < text.index("@media print")


def test_the_page_explains_each_timer():
    text = " ".join(page.METHOD)
    assert [
        timer for timer in ("wall", "graph", "events", "waits", "loop") if timer not in text
    ] == []
