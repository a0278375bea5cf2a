"""Pages with charts of what policies did on a trace: at one rate, step by step, and at several."""

from __future__ import annotations

from aioserve.simulation.report.layout import PolicyRun, RateRun
from aioserve.simulation.report.page import report_page
from aioserve.simulation.report.rates import goodput_chart, rate_page

__all__ = ["PolicyRun", "RateRun", "goodput_chart", "rate_page", "report_page"]
