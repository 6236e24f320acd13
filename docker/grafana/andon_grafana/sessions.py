"""What do the ranks of a plain script do?"""

from __future__ import annotations

from andon_grafana.panels import GREEN, Amounts, Curve, Number, Query, Row
from andon_grafana.promql import latest, rate

__all__ = ["ROW"]

_RANK = "rank {{rank}}"
_PAGE = "docs/protocol-sessions.md"
_ENDED = "andon_sessions_ended_total"
_NO_SESSION = "the run's workers train on a line, or no rank came yet"

_PRESENT = (
    Number(
        title="Ranks of the session",
        tells="How many ranks exchange with each other now. 0: the session is over, or not all "
        "ranks have attended; `andon status` says who is awaited.",
        see=_PAGE,
        queries=(Query(expr=latest("andon_session_ranks"), color=GREEN),),
        width=4,
    ),
    Amounts(
        title="Sessions ended since the run began",
        tells="By cause: in order, by a halt, or because a rank or the service was lost.",
        see=_PAGE,
        queries=(Query(expr=f"{latest(_ENDED, 'cause')} > 0", legend="{{cause}}"),),
        width=6,
        empty="none",
        may_be_empty="no session has ended",
    ),
    Curve(
        title="Part of the time in calls",
        tells="The part of each rank's time in which a call was open. The rank with the least is "
        "the one that the others wait for.",
        see=_PAGE,
        queries=(Query(expr=rate("andon_rank_exchange_seconds_total", "rank"), legend=_RANK),),
        width=7,
        unit="percentunit",
        may_be_empty=_NO_SESSION,
    ),
    Curve(
        title="Open call of each rank",
        tells="How long its oldest call had been open when it last reported. Calls that stay open "
        "wait for a rank; `andon status` names it.",
        see=_PAGE,
        queries=(Query(expr=latest("andon_rank_call_open_seconds", "rank"), legend=_RANK),),
        width=7,
        unit="s",
        may_be_empty=_NO_SESSION,
    ),
)

_RATES = (
    Curve(
        title="Steps a second",
        tells="Backward passes that exchanged something, and those whose scaled gradients "
        "overflowed.",
        see=_PAGE,
        queries=(
            Query(expr=rate("andon_rank_steps_total", "rank"), legend=_RANK),
            Query(expr=rate("andon_rank_overflows_total", "rank"), legend=f"{_RANK}, overflowed"),
        ),
        width=8,
        unit="suffix:steps/s",
        may_be_empty=_NO_SESSION,
    ),
    Curve(
        title="Calls a second",
        tells="Collectives and sends that have ended, of each rank.",
        see=_PAGE,
        queries=(Query(expr=rate("andon_rank_calls_total", "rank"), legend=_RANK),),
        width=8,
        unit="suffix:calls/s",
        may_be_empty=_NO_SESSION,
    ),
    Curve(
        title="Bytes given to calls a second",
        tells="Of their inputs. What travels is more or less than that: it depends on the call.",
        see=_PAGE,
        queries=(Query(expr=rate("andon_rank_call_bytes_total", "rank"), legend=_RANK),),
        width=8,
        unit="Bps",
        may_be_empty=_NO_SESSION,
    ),
)

ROW = Row(
    title="What do ranks of a plain script do?", panels=((6, _PRESENT), (7, _RATES)), collapsed=True
)
