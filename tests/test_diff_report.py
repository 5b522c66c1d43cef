"""Comparison reports: well-formed, escaped, and with the right numbers."""

import math
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from deepinfer.diff_chart import error_chart
from deepinfer.diff_report import number, to_html, to_junit, to_text

VOID = {"meta", "line", "circle", "br"}


class Page(HTMLParser):
    """Collects the elements of a page and checks that they nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def make_report(**changes: object) -> dict:
    """A report of one graph that differs at its last position."""
    positions = [
        {"position": 0, "rows": 4, "max_abs_error": 2e-7, "kl": 0.0, "top1_agreement": 1.0},
        {"position": 1, "rows": 4, "max_abs_error": 0.25, "kl": 0.5, "top1_agreement": 0.75},
    ]
    graph = {
        "name": "decode-4",
        "phase": "decode",
        "bucket": 4,
        "rows": 8,
        "excluded_rows": 1,
        "max_abs_error": 0.25,
        "mean_kl": 0.0625,
        "top1_agreement": 0.875,
        "min_margin": 0.003,
        "passed": False,
        "positions": positions,
    }
    part = {
        "graph": "decode-4",
        "layer": 3,
        "part": "attention",
        "rms_ratio": 0.5,
        "limit": 0.002,
        "passed": False,
    }
    return {
        "artifact_id": "ab" * 32,
        "model": "tiny",
        "precision": "float32",
        "passed": False,
        "tolerances": {"logits_max_abs": 1e-4},
        "graphs": [graph],
        "sublayers": [part, {**part, "layer": 4, "rms_ratio": 0.001, "passed": True}],
        "first_differing_layer": 3,
        "explanation": "the window record of layer 3 differs",
        **changes,
    }


def read_page(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    assert not page.open
    return page


def test_the_page_is_well_formed_and_fetches_nothing() -> None:
    page = read_page(to_html(make_report()))
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "a"}
    attributes = {name for _, attrs in page.elements for name in attrs}
    assert not attributes & {"src", "href", "onload", "onclick", "style"}
    assert "url(" not in to_html(make_report()) and "@import" not in to_html(make_report())
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.elements


def test_the_page_shows_the_numbers() -> None:
    text = read_page(to_html(make_report())).text
    for shown in (
        "decode-4",
        "0.25",
        "0.0625",
        "87.50%",
        "0.003",
        "attention",
        "0.5",
        "ab" * 32,
        "different",
    ):
        assert shown in text


def test_text_from_outside_is_escaped_everywhere() -> None:
    evil = "<script>alert('x')</script>\"&\x00"
    graph = {**make_report()["graphs"][0], "name": evil}
    part = {**make_report()["sublayers"][0], "part": evil}
    report = make_report(
        model=evil, precision=evil, explanation=evil, graphs=[graph], sublayers=[part], tolerances={evil: 1.0}
    )
    page = read_page(to_html(report))
    assert "script" not in {tag for tag, _ in page.elements}
    assert "<script>" not in to_html(report)
    cases = ElementTree.fromstring(to_junit(report)).findall(".//testcase")
    assert cases[0].get("name") == evil.replace("\x00", "\ufffd")


def test_an_equal_report_says_equal_and_has_no_failures() -> None:
    graph = {**make_report()["graphs"][0], "passed": True}
    report = make_report(
        passed=True, graphs=[graph], sublayers=[], first_differing_layer=None, explanation=""
    )
    assert to_text(report).startswith("equal") and "different" not in to_text(report)
    suite = ElementTree.fromstring(to_junit(report)).find("testsuite")
    assert suite is not None and (suite.get("tests"), suite.get("failures")) == ("1", "0")
    assert 'class="bad"' not in to_html(report)


def test_junit_counts_cases_and_failures_and_names_the_layer() -> None:
    suite = ElementTree.fromstring(to_junit(make_report())).find("testsuite")
    assert suite is not None and (suite.get("tests"), suite.get("failures")) == ("3", "2")
    failures = suite.findall("testcase/failure")
    assert "max error 0.25" in str(failures[0].get("message"))
    assert "first layer that differs: 3" in str(failures[0].text)
    assert [case.get("name") for case in suite] == [
        "decode-4",
        "decode-4 layer 3 attention",
        "decode-4 layer 4 attention",
    ]


def test_a_failed_comparison_without_a_failed_part_still_fails_in_junit() -> None:
    graph = {**make_report()["graphs"][0], "passed": True}
    suite = ElementTree.fromstring(to_junit(make_report(graphs=[graph], sublayers=[]))).find("testsuite")
    assert suite is not None and suite.get("failures") == "1"


def test_text_has_a_line_per_graph_and_names_what_differs() -> None:
    lines = to_text(make_report()).splitlines()
    assert "decode-4" in lines[1] and "0.25" in lines[1]
    assert "different  decode-4 layer 3 attention: 0.5 above 0.002" in lines
    assert "1 of 2 sublayers" in lines[2]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (math.nan, "not a number"), (math.inf, "infinite"), (0.0, "0"), (1.23456e-7, "1.23e-07")],
)
def test_numbers_read_well(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize("error", [math.nan, math.inf, None])
def test_an_error_that_is_not_a_number_ranks_worst_and_is_drawn_as_a_failure(error: float | None) -> None:
    report = make_report()
    report["graphs"][0]["positions"][0]["max_abs_error"] = error
    report["graphs"][0]["max_abs_error"] = error
    page = read_page(to_html(report))
    circles = [attrs for tag, attrs in page.elements if tag == "circle"]
    assert circles[0]["fill"] == "var(--bad)" and float(str(circles[0]["cy"])) < float(str(circles[1]["cy"]))
    assert page.text.index("not a number" if error != math.inf and error is not None else number(error)) > 0
    ElementTree.fromstring(to_junit(report))


def test_a_chart_places_larger_errors_higher_and_later_positions_further_right() -> None:
    points = [_point(position, 10.0 ** (position - 8)) for position in range(5)]
    circles = ElementTree.fromstring(error_chart("decode-4", points, 1e-6)).findall("circle")
    heights = [float(circle.get("cy", "nan")) for circle in circles]
    places = [float(circle.get("cx", "nan")) for circle in circles]
    assert heights == sorted(heights, reverse=True) and places == sorted(places)
    assert [circle.get("fill") for circle in circles] == ["var(--good)"] * 3 + ["var(--bad)"] * 2


@pytest.mark.parametrize("errors", [[0.0], [0.0, 0.0], [1e-30], [1e30, 0.0], [math.nan], [None], [1e-4] * 3])
def test_a_chart_of_odd_values_stays_inside_its_frame(errors: list[float | None]) -> None:
    points = [_point(index, error) for index, error in enumerate(errors)]
    for limit in (None, 1e-4):
        circles = ElementTree.fromstring(error_chart("x", points, limit)).findall("circle")
        assert len(circles) == len(errors)
        assert all(0 <= float(circle.get("cy", "nan")) <= 200 for circle in circles)


def test_a_long_chart_keeps_the_worst_of_each_group() -> None:
    points = [_point(position, 1e-6) for position in range(5000)]
    points[1234] = _point(1234, 1.0)
    circles = ElementTree.fromstring(error_chart("x", points, 1e-4)).findall("circle")
    assert len(circles) <= 300
    assert [circle.get("fill") for circle in circles].count("var(--bad)") == 1


def _point(position: int, error: float | None) -> dict[str, object]:
    return {"position": position, "rows": 1, "max_abs_error": error, "kl": 0.0, "top1_agreement": 1.0}
