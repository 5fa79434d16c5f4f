"""Reports: what a run says, as a page, in a terminal, and for programs."""

from telemetry.report.model import Report as Report
from telemetry.report.model import build_report as build_report
