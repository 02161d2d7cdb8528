"""The report of ``pyqueue doctor`` on Spark: the groups that read, and the stages that write."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from pyqueue.backends.bulk.stages import StageInfo
from pyqueue.backends.claims.groups import GroupInfo

#: The maximum number of groups, and of stages, that are named.
MAX_SHOWN: Final = 5


def described(groups: Sequence[GroupInfo], stages: Sequence[StageInfo], now: datetime) -> str:
    """Describe the groups and the stages of a namespace."""
    parts = [
        _listed("groups", [_group(each, now) for each in groups]),
        _listed("stages", [_stage(each, now) for each in stages]),
    ]
    return "; ".join(each for each in parts if each) or "no group reads, and no stage writes"


def _listed(name: str, texts: Sequence[str]) -> str:
    more = f" and {len(texts) - MAX_SHOWN} more" if len(texts) > MAX_SHOWN else ""
    return f"{name}: {', '.join(texts[:MAX_SHOWN])}{more}" if texts else ""


def _group(info: GroupInfo, now: datetime) -> str:
    runs = info.until is not None and info.until > now
    holder = f"{'run' if runs else 'last run'} by {info.holder or 'a former release'}"
    return f"{info.group!r} of queue {info.queue!r} ({holder}, holds {info.outstanding} messages)"


def _stage(info: StageInfo, now: datetime) -> str:
    name = f"{info.stage!r} of queue {info.queue!r}" if info.stage else f"queue {info.queue!r}"
    hours = max(0.0, (now - info.at).total_seconds() / 3600)
    return f"{name} (batch {info.epoch}, {hours:.1f} hours ago)"
