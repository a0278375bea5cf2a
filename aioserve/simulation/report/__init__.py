"""Pages with charts: of policies on a trace, at one rate step by step or at several rates, and of a
server under a load.
"""

from __future__ import annotations

from aioserve.simulation.report.layout import PolicyRun, RateRun, ServedRun
from aioserve.simulation.report.page import report_page
from aioserve.simulation.report.rates import goodput_chart, rate_page
from aioserve.simulation.report.served import served_page

__all__ = [
    "PolicyRun",
    "RateRun",
    "ServedRun",
    "goodput_chart",
    "rate_page",
    "report_page",
    "served_page",
]
