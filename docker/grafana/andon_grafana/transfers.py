"""What do newcomers and clients cost the network?"""

from __future__ import annotations

from andon_grafana.panels import Curve, Number, Query, Row
from andon_grafana.promql import grown, latest, rate
from andon_grafana.quantiles import quantiles

__all__ = ["ROW"]

_NOBODY = "nobody came"

_STATE = (
    Curve(
        title="State to newcomers, bytes a second",
        tells="Weights and the rest of the state, on their way to workers that joined.",
        see="docs/fault-tolerance.md#what-a-loss-costs",
        queries=(Query(expr=rate("andon_state_transfer_bytes_total"), legend="state"),),
        width=8,
        unit="Bps",
    ),
    Curve(
        title="Workers that get the state",
        tells="Workers that learn the line's state while the others train. The run's dashboard "
        "says how far behind each is.",
        see="docs/concepts/membership.md#a-worker-that-joins-while-the-line-trains",
        queries=(Query(expr=latest("andon_workers", where=('state="learning"',)), legend="learn"),),
    ),
    Number(
        title="Transfers, in the time shown",
        tells="Bytes of the line's state that newcomers received, and transfers that failed. The "
        "service's log (`state_not_received`) says which, and why.",
        see="docs/fault-tolerance.md#what-a-loss-costs",
        queries=(
            Query(expr=grown("andon_state_transfer_bytes_total"), legend="received", unit="bytes"),
            Query(expr=grown("andon_state_transfer_failures_total"), legend="failed"),
        ),
        decimals=0,
    ),
)

_TIMES = (
    Curve(
        title="Learning: p50, p95, p99",
        tells="How long a worker took to learn the line's state while the line trained. It ends "
        "when the worker takes part in a round.",
        see="docs/concepts/membership.md#a-worker-that-joins-while-the-line-trains",
        queries=quantiles("andon_learning_seconds"),
        unit="s",
        may_be_empty=_NOBODY,
    ),
    Curve(
        title="Pauses: p50, p95, p99",
        tells="How long the line stood still for the state of newcomers. Learners make no pause.",
        see="docs/fault-tolerance.md#what-a-loss-costs",
        queries=quantiles("andon_join_pause_seconds"),
        unit="s",
        may_be_empty=_NOBODY,
    ),
    Curve(
        title="TLS handshakes begun a second",
        tells="By clients, whether they succeeded or not. Many without new workers: somebody "
        "tries again and again, with a certificate that is refused.",
        see="docs/security.md#what-an-error-means",
        queries=(Query(expr=rate("andon_tls_handshakes_total"), legend="handshakes"),),
        width=8,
        unit="suffix:handshakes/s",
    ),
)

ROW = Row(title="What do newcomers add?", panels=((7, _STATE), (7, _TIMES)))
