"""A page with charts of what policies did on a trace; drawn by matplotlib, the extra `report`."""

from __future__ import annotations

from aioserve.simulation.report.page import check_can_draw, report_page
from aioserve.simulation.report.runs import PolicyRun

__all__ = ["PolicyRun", "check_can_draw", "report_page"]
