"""A comparison as text, as HTML for people and as JUnit XML for CI systems.

Works on the plain data that `DiffReport.to_dict` gives, so a report can be made again from a saved JSON file.
Knows nothing of tensors or artifacts. The HTML is one file: no script, nothing fetched, readable on a phone.
"""

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from xml.etree import ElementTree

from deepinfer.diff_chart import error_chart
from deepinfer.tolerances import LOGITS_MAX_ABS

Report = Mapping[str, Any]

_WORST_POSITIONS = 5  # rows of the table below a chart; the chart shows all
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --good: #18794e; --bad: #c62a2f; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
code { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
.columns th, .columns td { white-space: nowrap; }
svg { width: 100%; height: auto; display: block; margin: .5rem 0; }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
@media (prefers-color-scheme: dark) { :root { --good: #4cc38a; --bad: #ff8b8d; } }
"""


def to_text(report: Report) -> str:
    """A few lines for a terminal: the verdict, one line per graph, the sublayers that exceed their limit."""
    lines = [
        f"{_verdict(report['passed'])}  {report['model']}  {report['precision']}  {report['artifact_id']}"
    ]
    for graph in report["graphs"]:
        lines.append(
            f"{_verdict(graph['passed']):<9}  {graph['name']:<14} rows {graph['rows']:>5}"
            f"  apart {graph['excluded_rows']:>4}  max error {number(graph['max_abs_error']):>9}"
            f"  KL {number(graph['mean_kl']):>9}  top-1 {_share(graph['top1_agreement']):>7}"
            f"  margin {number(graph['min_margin'])}"
        )
    checked = report["sublayers"]
    failed = [part for part in checked if not part["passed"]]
    if checked:
        lines.append(f"{_verdict(not failed):<9}  {len(checked) - len(failed)} of {len(checked)} sublayers")
    lines += [
        f"different  {_part_name(part)}: {number(part['rms_ratio'])} above {number(part['limit'])}"
        for part in failed
    ]
    if report["first_differing_layer"] is not None:
        lines.append(f"first layer that differs: {report['first_differing_layer']}")
    if report["explanation"]:
        lines.append(str(report["explanation"]))
    return "\n".join(lines)


def to_html(report: Report) -> str:
    """The whole comparison as one self-contained page. Every text in it is escaped."""
    title = f"{_verdict(report['passed'])}: {report['model']}"
    facts = {
        "artifact": report["artifact_id"],
        "model": report["model"],
        "precision": report["precision"],
        "first layer that differs": report["first_differing_layer"],
        **{f"limit: {name}": number(value) for name, value in report["tolerances"].items()},
    }
    body = [
        f"<h1>{_badge(report['passed'])}: compiled against eager</h1>",
        _facts(facts),
        f"<p>{escape(str(report['explanation']))}</p>" if report["explanation"] else "",
        *(_graph_section(graph, report) for graph in report["graphs"]),
        _sublayer_section(report["sublayers"]),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def to_junit(report: Report) -> str:
    """One test case per graph and per sublayer; a difference is a failure with its numbers."""
    suite = ElementTree.Element("testsuite", name="deepinfer-diff")
    for graph in report["graphs"]:
        fault = (
            f"max error {number(graph['max_abs_error'])}, mean KL {number(graph['mean_kl'])},"
            f" top-1 agreement {_share(graph['top1_agreement'])}, {graph['excluded_rows']} of"
            f" {graph['rows']} rows apart"
        )
        _case(suite, "graph", graph["name"], None if graph["passed"] else fault, report)
    for part in report["sublayers"]:
        fault = f"rms ratio {number(part['rms_ratio'])} above {number(part['limit'])}"
        name = _part_name(part)
        _case(suite, "sublayer", name, None if part["passed"] else fault, report)
    if not report["passed"] and suite.find("testcase/failure") is None:
        _case(suite, "artifact", "whole", "the comparison failed", report)
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suite.set("errors", "0")
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def number(value: float | None) -> str:
    """Three significant digits; a dash for nothing, words for what is not a finite number."""
    if value is None:
        return "-"
    if isinstance(value, float) and not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    return f"{value:.3g}"


def _case(suite: ElementTree.Element, kind: str, name: str, fault: str | None, report: Report) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=f"deepinfer.{kind}", name=_xml_text(name))
    if fault is None:
        return
    layer = report["first_differing_layer"]
    detail = [fault, f"first layer that differs: {layer}" if layer is not None else "", report["explanation"]]
    failure = ElementTree.SubElement(case, "failure", message=_xml_text(fault), type="difference")
    failure.text = _xml_text("\n".join(str(line) for line in detail if line))


def _part_name(part: Report) -> str:
    """`decode-4 layer 3 attn`: a part is measured once per graph."""
    return f"{part['graph']} layer {part['layer']} {part['part']}"


def _graph_section(graph: Report, report: Report) -> str:
    # in native precision no single logit of the whole model is held to a limit
    sharp = report["precision"] == "float32" or graph["phase"] == "logits"
    limit = report["tolerances"].get(LOGITS_MAX_ABS) if sharp else None
    facts = {
        "rows compared": graph["rows"],
        "rows apart (close decisions)": graph["excluded_rows"],
        "max absolute error": number(graph["max_abs_error"]),
        "mean KL": number(graph["mean_kl"]),
        "top-1 agreement": _share(graph["top1_agreement"]),
        "smallest margin": number(graph["min_margin"]),
    }
    parts = [f"<h2>{_badge(graph['passed'])}: {escape(graph['name'])}</h2>", _facts(facts)]
    if graph["positions"]:
        parts.append(error_chart(graph["name"], graph["positions"], limit))
        parts.append(_worst(graph["positions"]))
    return "\n".join(parts)


def _worst(positions: Sequence[Report]) -> str:
    """The positions with the largest errors; one that is not a finite number is larger than any."""
    ranked = sorted(positions, key=lambda entry: -_size(entry["max_abs_error"]))[:_WORST_POSITIONS]
    rows = [
        [
            str(entry["position"]),
            str(entry["rows"]),
            number(entry["max_abs_error"]),
            number(entry["kl"]),
            _share(entry["top1_agreement"]),
        ]
        for entry in ranked
    ]
    return _table(["position", "rows", "max error", "KL", "top-1"], rows)


def _sublayer_section(sublayers: Sequence[Report]) -> str:
    if not sublayers:
        return ""
    rows = [
        [
            part["graph"],
            str(part["layer"]),
            part["part"],
            number(part["rms_ratio"]),
            number(part["limit"]),
            _verdict(part["passed"]),
        ]
        for part in sublayers
    ]
    return "<h2>Sublayers</h2>\n" + _table(["graph", "layer", "part", "rms ratio", "limit", "result"], rows)


def _facts(facts: Mapping[str, object]) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th><td><code>{escape(str(value))}</code></td></tr>'
        for name, value in facts.items()
        if value is not None
    )
    return f'<div class="scroll"><table>\n{rows}\n</table></div>'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table class="columns">\n<tr>{head}</tr>\n{body}\n</table></div>'


def _badge(passed: bool) -> str:
    return f'<span class="{"good" if passed else "bad"}">{_verdict(passed)}</span>'


def _verdict(passed: bool) -> str:
    return "equal" if passed else "different"


def _share(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{100 * value:.2f}%"


def _size(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value


def _xml_text(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
