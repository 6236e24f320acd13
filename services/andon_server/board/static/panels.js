// The charts of one run, and those of two runs over each other.

import { Chart, FIRST } from "./chart.js";
import { isLoss, joined } from "./curves.js";
import { count, duration, figure, rate, shortSpan, shortly, span } from "./words.js";

const COLOURS = ["--series-2", "--series-3", "--series-4", "--series-5"];
const MAIN = [
  { key: "loss", title: "Loss", format: figure, tick: shortly, tall: true, smooths: true },
  { key: "step_seconds", title: "Step time", format: span, tick: shortSpan, zero: true },
  { key: "samples_per_second", title: "Throughput", unit: "samples/s", format: rate, tick: count, zero: true },
];

const LOGGED = "Numbers that the script gives to andon_torch.log begin the curves.";

/**
 * Loss, step time, throughput, and a chart for each scalar that the script logs. A run of sessions
 * has only the latter, and those that are a loss in one chart.
 */
export class RunCharts {
  constructor(place) {
    this.place = place;
    this.charts = new Map();
    this.logs = false; // whether the run has only what its script logs
    for (const options of MAIN) this.#chart(options.key, options);
  }

  /** Ends all charts. */
  close() {
    for (const chart of this.charts.values()) chart.close();
    this.charts.clear();
  }

  /** Says what the charts wait for while they are empty: `step` is the line's last one. */
  expect(step, { logs = false } = {}) {
    this.logs = logs;
    const text = logs ? LOGGED : step > 0 ? "Reading the steps so far." : FIRST;
    for (const [key, chart] of this.charts) {
      chart.empty = text;
      chart.element.hidden = logs && MAIN.some((each) => each.key === key && key !== "loss");
    }
  }

  draw(curves) {
    const { steps } = curves;
    const losses = [...curves.scalars].filter(([name]) => isLoss(name));
    this.charts.get("loss").draw(...(this.logs ? loggedColumns(losses) : lossColumns(steps, losses)));
    for (const { key, title } of MAIN.slice(1)) {
      this.charts.get(key).draw([steps.step, steps[key]], [{ name: title.toLowerCase(), colour: "--series-1" }]);
    }
    this.#drawNorm(steps);
    const others = [...curves.scalars].filter(([name]) => !isLoss(name));
    const wanted = new Set(others.map(([name]) => `log:${name}`));
    for (const [key, chart] of this.charts) {
      if (key.startsWith("log:") && !wanted.has(key)) {
        chart.close();
        this.charts.delete(key);
      }
    }
    others.forEach(([name, { step, value }], index) => {
      const chart = this.#chart(`log:${name}`, { title: name, unit: "logged", format: figure, tick: shortly });
      chart.draw([step, value], [{ name, colour: COLOURS[index % COLOURS.length] }]);
    });
  }

  /** The gradient's norm, if the line asks for it. */
  #drawNorm({ step, gradient_norm: norm = [] }) {
    if (norm.some((each) => each !== null)) {
      this.#chart("norm", { title: "Gradient norm", format: figure, tick: shortly })
        .draw([step, norm], [{ name: "gradient norm", colour: "--series-1" }]);
    } else {
      this.charts.get("norm")?.close();
      this.charts.delete("norm");
    }
  }

  #chart(key, options) {
    let chart = this.charts.get(key);
    if (!chart) {
      chart = new Chart(options);
      this.charts.set(key, chart);
      this.place.append(chart.element);
    }
    return chart;
  }
}

/** The training loss, between its lowest and highest where it was reduced, and what is a loss, too. */
function lossColumns(steps, losses) {
  const train = { name: "train", colour: "--series-1" };
  const reduced = steps.loss.some((loss, index) => steps.loss_min[index] !== loss || steps.loss_max[index] !== loss);
  const columns = reduced
    ? [[steps.loss_min, { name: "lowest", edge: true }], [steps.loss_max, { name: "highest", edge: true }], [steps.loss, { ...train, band: [1, 2] }]]
    : [[steps.loss, train]];
  const base = columns.map(([value]) => ({ step: steps.step, value }));
  const data = losses.length ? joined([...base, ...losses.map(([, scalar]) => scalar)]) : [steps.step, ...base.map(({ value }) => value)];
  const series = losses.map(([name], index) => ({ name, colour: COLOURS[index % COLOURS.length] }));
  return [data, [...columns.map(([, each]) => each), ...series]];
}

/** What a script logs that is a loss. */
function loggedColumns(losses) {
  const series = losses.map(([name], index) => ({ name, colour: index ? COLOURS[(index - 1) % COLOURS.length] : "--series-1" }));
  return [joined(losses.map(([, scalar]) => scalar)), series];
}

/** Two or more runs over each other, by step or by the time since each began. */
export class ComparedCharts {
  constructor(place) {
    this.place = place;
    this.charts = [];
  }

  close() {
    for (const chart of this.charts) chart.close();
    this.charts = [];
  }

  /** `runs` are [{name, curves}]; `by` is "step" or "time". */
  draw(runs, by) {
    this.close();
    const x = by === "time" ? { axis: "time", axisFormat: duration } : {};
    const kinds = MAIN.map((each) => ({ ...each, of: (curves) => ({ step: along(curves, by), value: curves.steps[each.key] }) }));
    const names = new Set(runs.flatMap(({ curves }) => [...curves.scalars.keys()]));
    for (const name of names) {
      kinds.push({ title: name, unit: "logged", format: figure, tick: shortly, of: (curves) => logged(curves, name, by) });
    }
    for (const { of, ...options } of kinds) {
      const chart = new Chart({ ...options, ...x, empty: "Neither run has this curve." });
      this.charts.push(chart);
      this.place.append(chart.element);
      const series = runs.map(({ name }, index) => ({ name, colour: `--series-${index + 1}`, dashed: index === 1 }));
      chart.draw(joined(runs.map(({ curves }) => of(curves))), series);
    }
  }
}

function along(curves, by) {
  const { step, at_unix_s: at } = curves.steps;
  return by === "time" ? at.map((each) => each - at[0]) : step;
}

/** A scalar has no clock of its own: it takes the time of the first step that is not before it. */
function logged(curves, name, by) {
  const scalar = curves.scalars.get(name) ?? { step: [], value: [] };
  if (by !== "time") return scalar;
  const { step, at_unix_s: at } = curves.steps;
  let place = 0;
  const times = scalar.step.map((each) => {
    while (place < step.length - 1 && step[place] < each) place += 1;
    return (at[place] ?? 0) - (at[0] ?? 0);
  });
  return { step: times, value: scalar.value };
}
