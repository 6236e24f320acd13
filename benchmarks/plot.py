"""Draws the figures of some benchmarks from their JSON, for the documentation.

    python benchmarks/plot.py                 # benchmarks/results -> docs/figures

What has no JSON yet is left out. It needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.ticker

matplotlib.use("svg")
import matplotlib.pyplot as plt  # after the choice of the backend

ROOT = Path(__file__).parents[1]
Rows = Sequence[Mapping[str, Any]]


def main() -> None:
    """Draws each figure whose JSON is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    # The same figures give the same bytes.
    plt.rcParams.update({"svg.hashsalt": "andon", "svg.fonttype": "none", "font.size": 9})
    for name, draw in FIGURES.items():
        source = options.results / f"{name}.json"
        if not source.exists():
            continue
        draw(json.loads(source.read_text())["rows"])
        target = options.out / f"{name}.svg"
        plt.savefig(target, metadata={"Date": None}, bbox_inches="tight")
        plt.close()
        # Matplotlib leaves spaces at ends of lines.
        lines = target.read_text().splitlines()
        target.write_text("".join(f"{line.rstrip()}\n" for line in lines))
        print(target)


def draw_uneven(rows: Rows) -> None:
    """Each schedule's part of the ideal, and the shares that two of them dealt over time."""
    schedules = [row for row in rows if row["schedule"] != "ideal"]
    dealt = [row for row in schedules if row["schedule"] in ("balanced", "cadence")]
    _, axes = plt.subplots(
        1, 1 + len(dealt), figsize=(4.5 + 3.5 * len(dealt), 3), squeeze=False, layout="constrained"
    )
    bars = axes[0][0]
    names = [row["schedule"] for row in schedules]
    bars.barh(
        names, [row["of_ideal"] for row in schedules], color="#4878a8", label="all of the run"
    )
    bars.plot(
        [row["settled"] for row in schedules],
        names,
        "D",
        color="#c44e52",
        label="once it has settled",
    )
    bars.axvline(1.0, color="black", lw=0.8)
    bars.invert_yaxis()
    bars.set(xlabel="of the ideal", xlim=(0, 1.08))
    bars.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=7)
    for plot, row in zip(axes[0][1:], dealt, strict=True):
        _draw_shares(plot, row)


def _draw_shares(plot: Any, row: Mapping[str, Any]) -> None:
    times = [window["ended_s"] for window in row["windows"]]
    totals = [sum(window["samples"]) for window in row["windows"]]
    for worker in range(len(row["windows"][0]["samples"])):
        parts = [
            window["samples"][worker] / total
            for window, total in zip(row["windows"], totals, strict=True)
        ]
        plot.step(times, parts, where="pre", lw=1.2, label=f"worker {worker}")
    done = 0
    for time, total in zip(times, totals, strict=True):
        done += total
        if done > sum(totals) / 2:
            plot.axvline(time, color="black", lw=0.8, ls=":")
            break
    plot.set(title=row["schedule"], xlabel="s (dotted: the swap)", ylabel="share", ylim=(0, None))
    plot.legend(fontsize=7)


def draw_thin(rows: Rows) -> None:
    """How much of their time two hosts compute at each speed, with overlap (dashed) and without."""
    overlap = "-overlap"
    names = list(dict.fromkeys(str(row["schedule"]).removesuffix(overlap) for row in rows))
    _, plot = plt.subplots(figsize=(6, 3), layout="constrained")
    speeds = groupby(rows, key=lambda row: float(row["mbit"]))
    for number, (mbit, each) in enumerate(speeds):
        found = {row["schedule"]: row["utilisation"] for row in each}
        for suffix, style in (("", "o-"), (overlap, "o--")):
            known = [name for name in names if name + suffix in found]
            plot.plot(
                known,
                [found[name + suffix] for name in known],
                style,
                color=f"C{number}",
                label=f"{mbit:g} Mbit/s{suffix.replace('-', ', ')}",
            )
    plot.axhline(1.0, color="black", lw=0.8)
    plot.set(ylabel="time spent computing", ylim=(0, 1.08))
    plot.grid(alpha=0.3)
    plot.legend(fontsize=7)


def draw_convergence(rows: Rows) -> None:
    """The mean loss of all seeds on unseen samples, by samples, for each task."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    names = list(dict.fromkeys(row["schedule"] for row in rows))
    lines = -(-len(tasks) // 2)
    figure, axes = plt.subplots(
        lines, 2, figsize=(9, 3.2 * lines), squeeze=False, layout="constrained"
    )
    for plot in axes.flat[len(tasks) :]:
        plot.set_axis_off()
    for plot, task in zip(axes.flat, tasks, strict=False):
        for row in rows:
            if row["task"] == task:
                _draw_curve(plot, row, names.index(row["schedule"]))
        plot.set(title=task, xlabel="samples", ylabel="loss on unseen samples", yscale="log")
        plot.grid(alpha=0.3, which="both")
        low, high = plot.get_ylim()
        if high < 10 * low:  # Without a power of ten among the ticks, the others need numbers.
            plot.yaxis.set_minor_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
    handles = [plot.get_legend_handles_labels() for plot in axes.flat]
    named = {label: line for pair in handles for line, label in zip(*pair, strict=True)}
    figure.legend(named.values(), named.keys(), fontsize=7, loc="outside right upper")


def _draw_curve(plot: Any, row: Mapping[str, Any], number: int) -> None:
    """The mean over seeds at the samples of the first; another seed's is interpolated."""
    import numpy as np

    samples = [at for at, _ in row["curves"][0]]
    losses = [
        np.interp(samples, [at for at, _ in curve], [loss for _, loss in curve])
        for curve in row["curves"]
    ]
    solo = row["schedule"] == "solo"
    plot.plot(
        samples,
        np.mean(losses, axis=0),
        color="black" if solo else plt.get_cmap("tab20")(number % 20),
        ls="-" if number < 20 else "--",
        lw=2 if solo else 1.2,
        zorder=1 if solo else 2,
        label=row["schedule"],
    )


def draw_storm(rows: Rows) -> None:
    """What each system keeps of its speed, and what it committed while all had the same faults."""
    shortest = min(row["storm_s"] for row in rows)
    _, (bars, plot) = plt.subplots(
        1, 2, figsize=(10, 3.2), width_ratios=(2, 3), layout="constrained"
    )
    for number, row in enumerate(rows):
        part, color = row["of_undisturbed"], f"C{number}"
        bars.barh(row["system"], part, color=color)
        bars.text(part + 0.02, number, f"{part:.0%}", va="center")
        seen = [(at, total) for at, total in row["timeline"] if at <= shortest]
        times = [at for at, _ in seen]
        samples = [(total - seen[0][1]) / 1000 for _, total in seen]
        plot.step(
            [*times, shortest],
            [*samples, samples[-1] if samples else 0],
            where="post",
            color=color,
            label=row["system"],
        )
    for at, kind in rows[0]["fault_times"]:
        if at <= shortest:
            plot.axvline(at, color="black", lw=0.6, ls=_LINE_OF_FAULT[kind], alpha=0.5, zorder=0)
    bars.axvline(1.0, color="black", lw=0.8)
    bars.invert_yaxis()
    bars.set(xlabel="samples a second, of those undisturbed", xlim=(0, 1.12))
    plot.set(
        xlabel="s (lines: SIGKILL of a worker; dashed: SIGSTOP; dotted: SIGKILL of the service)",
        ylabel="thousand samples committed",
        xlim=(0, shortest),
        ylim=(0, None),
    )
    plot.legend(fontsize=7)


_LINE_OF_FAULT = {"kill-worker": "-", "freeze-worker": "--", "kill-service": ":"}


FIGURES: dict[str, Callable[[Rows], None]] = {
    "uneven": draw_uneven,
    "thin": draw_thin,
    "convergence": draw_convergence,
    "storm": draw_storm,
}

if __name__ == "__main__":
    main()
