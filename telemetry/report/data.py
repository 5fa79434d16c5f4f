"""The report for programs: JSON whose keys stay what they are within one version.

```
{"v": 1, "run_id": ..., "title": ..., "subtitle": ..., "verdict": ..., "warnings": [...],
 "figures": {"itl_p99_s": {"value": 0.0123, "unit": "s", "source": ..., "num_samples": 4711}, ...},
 "sections": [{"key": "memory", "title": ..., "lead": ..., "figures": ["memory_total_bytes", ...],
               "tables": [{"caption": ..., "columns": [{"label": ..., "unit": ...}], "rows": ...}],
               "notes": [...]}, ...]}
```

A gate reads `figures`: the unit stands at the end of each key, values are in SI base units, bytes,
counts, or ratios from 0 to 1. What is not known has `"value": null` and a `"reason"`; in a table it
is `{"reason": ...}`, and a number with a unit of its own `{"value": ..., "unit": ...}`. The tables
behind the charts are among the tables, under the charts' keys.
"""

import json
from typing import TYPE_CHECKING, Any

from telemetry.report.values import Figure, NotAvailable, Quantity, Section, Table, Value

if TYPE_CHECKING:
    from telemetry.report.model import Report

VERSION = 1


def to_text(report: "Report") -> str:
    """The report as JSON text."""
    return json.dumps(to_data(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_data(report: "Report") -> dict[str, Any]:
    """The report as what `json` can write."""
    return {
        "v": VERSION,
        "run_id": report.run_id,
        "title": report.title,
        "subtitle": report.subtitle,
        "verdict": report.verdict,
        "warnings": list(report.warnings),
        "figures": {key: _figure(figure) for key, figure in report.figures.items()},
        "sections": [_section(section) for section in report.sections],
    }


def _figure(figure: Figure) -> dict[str, Any]:
    data: dict[str, Any] = {"value": None, "unit": figure.unit, "source": figure.source}
    if isinstance(figure.value, NotAvailable):
        data["reason"] = figure.value.reason
    else:
        data["value"] = figure.value
    if figure.num_samples is not None:
        data["num_samples"] = figure.num_samples
    return data


def _section(section: Section) -> dict[str, Any]:
    return {
        "key": section.key,
        "title": section.title,
        "lead": section.lead,
        "figures": [figure.key for figure in section.all_figures],
        "tables": [
            *map(_table, section.summary),
            *({"chart": chart.key, **_table(chart.table)} for chart in section.charts),
            *map(_table, section.tables),
        ],
        "notes": list(section.notes),
    }


def _table(table: Table) -> dict[str, Any]:
    return {
        "caption": table.caption,
        "columns": [{"label": c.label, "unit": c.unit} for c in table.columns],
        "rows": [[_cell(cell) for cell in row] for row in table.rows],
    }


def _cell(value: Value) -> Any:
    match value:
        case NotAvailable(reason):
            return {"reason": reason}
        case Quantity(number, unit):
            return {"value": number, "unit": unit}
    return value
