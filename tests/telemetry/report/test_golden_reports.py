"""Reports of kept runs, compared as a whole with what they said before."""

import json

import pytest

from tests.telemetry.report.golden_reports import FOLDER, report_data, runs


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_a_kept_run_is_reported_as_it_was_before(name):
    expected = json.loads((FOLDER / f"{name}.report.json").read_text(encoding="utf-8"))

    assert report_data(runs()[name]) == expected
