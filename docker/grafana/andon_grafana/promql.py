"""The vocabulary of the queries: every one is of one run, or by run, and aggregated by what its
legend shows.

Rates use Grafana's `$__rate_interval`, which is at least four scrape intervals: one lost scrape
leaves no hole. What is rare is counted over `$__range`, the time that the dashboard shows.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "NOT_OF_WORKERS",
    "OF_WORKER",
    "OF_WORKERS",
    "by_process",
    "code",
    "grown",
    "happened",
    "latest",
    "mean",
    "mean_of",
    "of",
    "quantile",
    "rate",
    "rate_of",
    "slope",
    "total",
]

_RUN = 'run="$run"'
_RUNS = 'run=~"$runs"'
OF_WORKER = 'worker=~"$worker"'
"""Of the worker that is selected, where the legend need not name it."""
OF_WORKERS = 'worker!=""'
"""As workers count it."""
NOT_OF_WORKERS = 'worker=""'
"""As the service and separate reducers count it."""
_WINDOW = "$__rate_interval"
_SHOWN = "$__range"


def of(metric: str, *matchers: str, by: tuple[str, ...] = ()) -> str:
    """A metric of the run that is selected; by run, of the runs that are."""
    return f"{metric}{{{', '.join((_RUNS if 'run' in by else _RUN, *matchers))}}}"


def latest(metric: str, *by: str, where: tuple[str, ...] = ()) -> str:
    """A metric's value. Of two instances of a process that was restarted, the larger."""
    return _fold("max", of(metric, *_chosen(by), *where, by=by), by)


def total(metric: str, *by: str, where: tuple[str, ...] = ()) -> str:
    """A metric's sum over processes."""
    return _fold("sum", of(metric, *_chosen(by), *where, by=by), by)


def rate_of(counter: str, *matchers: str, by: tuple[str, ...] = ()) -> str:
    """How fast each series of a counter grows a second."""
    return f"rate({of(counter, *matchers, by=by)}[{_WINDOW}])"


def rate(metric: str, *by: str, where: tuple[str, ...] = ()) -> str:
    """How fast a counter grows a second."""
    return _fold("sum", rate_of(metric, *_chosen(by), *where, by=by), by)


def grown(metric: str, *by: str, where: tuple[str, ...] = ()) -> str:
    """How much a counter grew in the time that the dashboard shows."""
    return _fold("sum", f"increase({of(metric, *_chosen(by), *where, by=by)}[{_SHOWN}])", by)


def happened(counter: str, *by: str, where: tuple[str, ...] = ()) -> str:
    """As `grown`, without what did not grow."""
    return f"{grown(counter, *by, where=where)} > 0"


def mean_of(gauge: str, *by: str) -> str:
    """A gauge's mean over a few scrapes."""
    return _fold("max", f"avg_over_time({of(gauge, *_chosen(by))}[{_WINDOW}])", by)


def slope(gauge: str, *by: str) -> str:
    """How fast a gauge that counts up grows a second."""
    return _fold("max", f"deriv({of(gauge, *_chosen(by))}[{_WINDOW}])", by)


def quantile(part: float, histogram: str, *by: str, where: tuple[str, ...] = ()) -> str:
    """A quantile of what a histogram got lately."""
    buckets = rate(f"{histogram}_bucket", "le", *by, where=where)
    return f"histogram_quantile({part:g}, {buckets})"


def mean(histogram: str) -> str:
    """The mean of what a histogram got in the time that the dashboard shows; nothing if none."""
    return f"{grown(f'{histogram}_sum')} / ({grown(f'{histogram}_count')} > 0)"


def code(metric: str, label: str, codes: Mapping[str, int], *by: str) -> str:
    """The code of the label whose series is 1; the largest code, should two be 1 at once."""
    terms = []
    for value, number in codes.items():
        series = of(metric, *_chosen(by), f'{label}="{value}"', by=by)
        terms.append(f"{number} * ({series} == 1)")
    return _fold("max", " or ".join(terms), by)


def by_process(vector: str) -> str:
    """A vector by `process`: the service, each worker and each separate reducer."""
    named = f'label_replace({vector}, "process", "service", "", "")'
    for label in ("worker", "reducer"):
        named = f'label_replace({named}, "process", "{label} $1", "{label}", "(.+)")'
    return _fold("max", named, ("process",))


def _chosen(by: tuple[str, ...]) -> tuple[str, ...]:
    return (OF_WORKER,) if "worker" in by else ()


def _fold(how: str, vector: str, by: tuple[str, ...]) -> str:
    return f"{how} by ({', '.join(by)}) ({vector})" if by else f"{how}({vector})"
