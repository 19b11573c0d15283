"""Reports of a test's ranks merged into one: equal failures once, first cause first."""

from __future__ import annotations

import io
import os
import pickle
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from traceback import StackSummary
from typing import Any, Literal
from warnings import WarningMessage

import pytest
from _pytest._code.code import (
    ExceptionChainRepr,
    ReprEntryNative,
    ReprFileLocation,
    ReprTracebackNative,
)

from unisono.deadlines import format_s
from unisono.errors import CollectiveTimeoutError
from unisono.pool.call import PoolCall
from unisono.testing.pytest_plugin.body import RankReport, TestFailed
from unisono.testing.pytest_plugin.plugin import Place
from unisono.topology import named
from unisono.tracebacks import fold_text

_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
_BODY = os.sep + os.path.join("_pytest", "python.py")  # calls a test's body
_STRICT = "[XPASS(strict)]"
_NO_ANSWER = "  it doesn't answer: it is stopped, or Python is 3.10\n"
Printed = Mapping[str, Mapping[int, io.StringIO]]  # by stream and rank
_Outcome = Literal["passed", "failed", "skipped"]


class RanksFailed(Exception):
    """Raised in the parent for a test that failed in its ranks."""


@dataclass
class Merged:
    """The report of a test, merged from those of its ranks."""

    outcome: _Outcome = "passed"
    when: Literal["setup", "call", "teardown"] = "call"
    longrepr: Any = None
    wasxfail: str | None = None
    sections: list[tuple[str, str]] = field(default_factory=list)
    properties: list[tuple[str, object]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    has_lost_context: bool = False

    def raise_unless_passed(self) -> None:
        """Raise unless the test passed."""
        if self.outcome == "skipped" and self.wasxfail is None:
            raise pytest.skip.Exception(str(self.longrepr[2]), _use_item_location=True)
        # Raised for an xfail, too; `copy_to` replaces the report of this exception.
        if self.outcome != "passed":
            raise RanksFailed(_headline(self.longrepr))

    def copy_to(self, report: pytest.TestReport) -> None:
        """Copy this into the session's own report."""
        report.outcome = self.outcome
        report.when = self.when
        report.longrepr = self.longrepr
        report.sections = [*report.sections, *self.sections]
        report.user_properties = [*report.user_properties, *self.properties]
        report.__dict__.pop("wasxfail", None)  # pytest may have set it for this process's exception
        if self.wasxfail is not None:
            report.wasxfail = self.wasxfail


@dataclass
class _Rank:
    """One rank's report, with pytest's reports of the phases loaded as objects."""

    rank: int
    report: RankReport
    phases: list[pytest.TestReport]

    @property
    def decisive(self) -> pytest.TestReport:
        """The report of the failure, else of the skip, else the last."""
        # Reversed, so that the first report of each outcome is the one that stays.
        by_outcome = {report.outcome: report for report in reversed(self.phases)}
        return by_outcome.get("failed") or by_outcome.get("skipped") or self.phases[-1]

    @property
    def is_unexpected_pass(self) -> bool:
        """Whether the test passed on this rank, which a strict xfail counts as a failure."""
        return str(self.decisive.longrepr).startswith(_STRICT)


def merge(answers: PoolCall, place: Place, item: pytest.Item, printed: Printed) -> Merged:
    """Merge the ranks' reports into one."""
    ranks = _by_rank(answers, item)
    warned = [warning for each in ranks for warning in each.report.warnings]
    for text, category, file, line in dict.fromkeys(warned):
        message = WarningMessage(text, category, file, line)
        facts = {"warning_message": message, "when": "runtest", "nodeid": item.nodeid}
        # This hook is historic, and can't be called directly.
        item.ihook.pytest_warning_recorded.call_historic(kwargs={**facts, "location": None})
    merged = _verdict(answers, place, item, ranks)
    merged.has_lost_context = any(each.report.has_lost_context for each in ranks)
    merged.sections = [*_sections(ranks, printed, place.size)]
    for each in ranks:
        properties = each.phases[-1].user_properties  # the last phase has those of all
        merged.properties += [p for p in properties if p not in merged.properties]
    return merged


def _verdict(answers: PoolCall, place: Place, item: pytest.Item, ranks: list[_Rank]) -> Merged:
    """Decide how the test ended."""
    failed = [one for one in ranks if one.decisive.failed]
    skips = [one.decisive for one in ranks if one.decisive.skipped]
    is_lost = answers.error is not None or bool(answers.late)
    has_cause = any(not (one.report.is_secondary or one.is_unexpected_pass) for one in failed)
    if is_lost or has_cause:
        return _failure(answers, place, item, failed)
    # The remaining failures are of ranks that waited for another one, or passed against a strict
    # xfail, which one failing rank satisfies. A skip or an expected failure explains both.
    if skips:
        first = min(skips, key=lambda report: not hasattr(report, "wasxfail"))  # an xfail first
        return Merged("skipped", "call", first.longrepr, getattr(first, "wasxfail", None))
    if failed or len(ranks) < place.size:
        return _failure(answers, place, item, failed)
    reasons = [r.wasxfail for one in ranks for r in one.phases if hasattr(r, "wasxfail")]
    return Merged(wasxfail=reasons[0] if reasons else None)


def _by_rank(answers: PoolCall, item: pytest.Item) -> list[_Rank]:
    """Return the reports by rank; a rank that failed outside of the test's phases gets one."""
    load = partial(item.config.hook.pytest_report_from_serializable, config=item.config)

    def loaded(rank: int, report: RankReport) -> _Rank:
        return _Rank(rank, report, [load(data=data) for data in report.phases])

    ranks = [loaded(rank, pickle.loads(given[0])) for rank, given in answers.answers.items()]
    for rank, failure in answers.failures.items():
        cause = None if failure.cause is None else pickle.loads(failure.cause)
        if isinstance(cause, TestFailed):
            ranks.append(loaded(rank, cause.report))
        elif isinstance(cause, pytest.exit.Exception):  # ends the session, as in the parent
            raise cause
        else:
            longrepr = _repr_of(item, failure.summary, failure.traceback)
            phase = pytest.TestReport(item.nodeid, item.location, {}, "failed", longrepr, "call")
            # When it failed is unknown; the present is later than all known times.
            ranks.append(_Rank(rank, RankReport(failed_at=time.monotonic()), [phase]))
    return sorted(ranks, key=lambda each: each.rank)


def _failure(answers: PoolCall, place: Place, item: pytest.Item, failed: Sequence[_Rank]) -> Merged:
    """Build the report: the loss, the timeout or the first cause, then the other failures."""
    groups = others = _groups(failed)
    longrepr: Any
    when: Any = "call"
    if answers.error is not None:
        text = str(answers.error)
        longrepr = _repr_of(item, text.partition("\n")[0], text)
    elif answers.late:
        wasnt = "wasn't" if len(answers.late) == 1 else "weren't"
        limit = f"{format_s(place.timeout_s)} ({place.backend})"
        head = f"{named(answers.late)} of {place.size} {wasnt} done after {limit}"
        longrepr = _repr_of(item, head, _stacks(answers, place.size))
    else:
        first, *others = groups
        when = first[0].decisive.when
        longrepr = _with_head(first[0].decisive.longrepr, f"{_who(first, place)}:", item)
    for group in others:
        other = group[0].decisive.longrepr
        if group[0].report.is_secondary:
            longrepr.addsection(f"{_who(group, place)}, because of it", _headline(other))
        else:
            longrepr.addsection(_who(group, place), str(other))
    if answers.stacks and not answers.late:
        waited = f"{named(answers.stacks)} of {place.size} still ran, and were ended"
        longrepr.addsection(waited, _stacks(answers, place.size))
    ranks = [one.rank for group in groups for one in group]
    # `failed` is for the debugger: after an error of the whole job no rank is left.
    return Merged("failed", when, longrepr, failed=[] if answers.error else ranks)


def _groups(failed: Iterable[_Rank]) -> list[list[_Rank]]:
    """Group ranks by equal failure: causes before their consequences, each the earliest first."""
    groups: dict[tuple[bool, str], list[_Rank]] = {}
    for one in sorted(
        failed, key=lambda r: (r.report.is_secondary, r.is_unexpected_pass, r.report.failed_at)
    ):
        # Failures that differ only in addresses are equal.
        text = _ADDRESS.sub("0x", f"{one.decisive.when} {_headline(one.decisive.longrepr)}")
        groups.setdefault((one.report.is_secondary, text), []).append(one)
    return list(groups.values())


def _who(group: Iterable[_Rank], place: Place) -> str:
    """Return ranks as in "ranks 0, 2 of 4 (gloo)"."""
    return f"{named([one.rank for one in group])} of {place.size} ({place.backend})"


def _repr_of(item: pytest.Item, headline: str, text: str) -> ExceptionChainRepr:
    """Build the representation of a failure without an exception in this process."""
    path, line, _ = item.location
    crash = ReprFileLocation(path, (line or 0) + 1, headline)  # pytest counts lines from 0
    lines = [] if text.startswith(headline) else [f"E   {headline}\n"]
    traceback = ReprTracebackNative([*lines, f"{text.rstrip()}\n"])
    return ExceptionChainRepr([(traceback, crash, None)])


def _with_head(longrepr: Any, head: str, item: pytest.Item) -> Any:
    """Insert a line at the head of a failure, and before its message in the summary."""
    if not isinstance(longrepr, ExceptionChainRepr):
        text = str(longrepr)
        longrepr = _repr_of(item, text.strip().partition("\n")[0], text)
    first_traceback = longrepr.chain[0][0]
    first_traceback.reprentries = [ReprEntryNative([f"{head}\n"]), *first_traceback.reprentries]
    if longrepr.reprcrash is not None:
        longrepr.reprcrash.message = f"{head} {longrepr.reprcrash.message}"
    return longrepr


def _headline(longrepr: Any) -> str:
    """Return a failure's last exception in one line, or its whole text without an exception."""
    crash = getattr(longrepr, "reprcrash", None)
    return str(longrepr) if crash is None else f"{crash.path}:{crash.lineno}: {crash.message}"


def _stacks(answers: PoolCall, size: int) -> str:
    """Write the ranks' frames from the test's body inwards, and which ranks are done."""
    done = sorted(answers.answers)
    was = "was" if len(done) == 1 else "were"
    parts = [f"{named(done)} of {size} {was} done\n"] if done else []
    for rank, frames in sorted(answers.stacks.items()):
        # Frames up to the last of pytest's python.py are of the rank's session, not of the body.
        starts = [at for at, frame in enumerate(frames, 1) if frame.filename.endswith(_BODY)]
        body = StackSummary.from_list(frames[max(starts, default=0) :])
        shown = fold_text("".join(body.format())) or _NO_ANSWER
        parts.append(f"rank {rank} of {size}:\n{shown}")
    return "\n".join(parts)


def _sections(ranks: Sequence[_Rank], printed: Printed, size: int) -> Iterable[tuple[str, str]]:
    """Yield sections of the ranks' output and logs, equal ones once."""
    by_text: dict[tuple[str, str], list[int]] = {}
    for one in ranks:
        for name, text in one.phases[-1].sections:  # the last phase has the sections of all
            by_text.setdefault((name, text), []).append(one.rank)
    for name, streams in printed.items():
        for rank, kept in sorted(streams.items()):
            by_text.setdefault((f"Captured {name} call", kept.getvalue()), []).append(rank)
    for (name, text), group in by_text.items():
        if text:
            yield f"{name} ({named(group)} of {size})", text


def error_of(answers: PoolCall, size: int, what: str, timeout_s: float) -> BaseException:
    """Return the error of a call outside a test."""
    if answers.error is not None:
        return answers.error
    if answers.late:
        return CollectiveTimeoutError(
            f"{what} wasn't done on {named(answers.late)} of {size} after "
            f"{format_s(timeout_s)}\n{_stacks(answers, size)}"
        )
    # The rank whose failure was least likely caused by another rank's.
    rank = min(answers.failures, key=lambda rank: (answers.failures[rank].cause_order, rank))
    return answers.failures[rank].error(rank, size)
