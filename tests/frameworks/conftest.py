"""A skip for want of a framework fails where OPTIMIZER_FRAMEWORKS names the framework, as in CI.

Without it, a job in which no framework could be imported would pass: its tests would all be skipped.
"""

from __future__ import annotations

import os
import re

import pytest

REQUIRED = os.environ.get("OPTIMIZER_FRAMEWORKS", "").split()  # names of modules


def _failed_if_required(report: pytest.TestReport | pytest.CollectReport) -> pytest.TestReport | pytest.CollectReport:
    reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
    if missing := [name for name in REQUIRED if re.search(rf"\b{re.escape(name)}\b", reason)]:
        report.outcome = "failed"
        report.longrepr = f"{reason}; OPTIMIZER_FRAMEWORKS asks for {', '.join(missing)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _failed_if_required((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):  # modules skip as they are imported
    return _failed_if_required((yield))
