// One chart: uPlot on a canvas, its own legend with units, and a description for those who can't see it.

import { smoothed } from "./curves.js";
import { fill, make, mark, say } from "./dom.js";
import { NONE, count } from "./words.js";

/** What an empty chart says before the first step. */
export const FIRST = "The first committed step begins the curve.";

const SYNC = "step";
const SMOOTHING = 0.9; // the weight of what came before
const charts = new Set();

/** What all charts share: how many of the last steps they show (0: all), and what happened when. */
const shared = { range: 0, marks: [] };

/** Shows only the last `steps` steps in every chart; 0 shows all. */
export function showRange(steps) {
  shared.range = steps;
  for (const chart of charts) chart.redraw();
}

/** Marks steps in every chart: [{step, colour}], `colour` the name of a CSS property. */
export function showMarks(marks) {
  if (JSON.stringify(marks) === JSON.stringify(shared.marks)) return;
  shared.marks = marks;
  for (const chart of charts) chart.plot?.redraw(false);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of charts) chart.redraw();
});

/** A figure with a title, a legend and a canvas. `element` is put into the page by the caller. */
export class Chart {
  /**
   * @param {{title: string, unit?: string, format: (n: number) => string, tick?: (n: number) => string, zero?: boolean,
   *   tall?: boolean, smooths?: boolean, empty?: string, axis?: string, axisFormat?: (n: number) => string}} options
   *   `tick` writes the axis' numbers. `zero`: the axis begins at 0. `axis` names x in words.
   *   `smooths`: there is a button that draws moving averages.
   */
  constructor(options) {
    this.options = { axis: "step", axisFormat: count, empty: FIRST, ...options };
    this.logarithmic = this.smooth = false;
    this.shape = "";
    this.legend = make("ul", { class: "legend" });
    const buttons = [this.#button("log", "Logarithmic scale", "log scale", "logarithmic")];
    if (options.smooths) buttons.unshift(this.#button("smooth", "Moving average", "smooth curve", "smooth"));
    this.canvas = make("div", { class: "plot", role: "img", "aria-label": `${options.title}: no steps yet` });
    this.nothing = make("p", { class: "nothing" }, this.options.empty);
    const unit = options.unit ? make("span", { class: "unit" }, options.unit) : null;
    this.element = make(
      "figure",
      { class: options.tall ? "chart tall" : "chart" },
      make("figcaption", {}, make("h3", { title: options.title }, options.title), unit, this.legend, make("span", { class: "buttons" }, buttons)),
      make("div", { class: "stage" }, this.canvas, this.nothing),
    );
    mark(this.element, "data-empty", "yes");
    this.resize = new ResizeObserver(() => this.#fit());
    this.resize.observe(this.canvas);
    charts.add(this);
  }

  /** Ends it. */
  close() {
    charts.delete(this);
    this.resize.disconnect();
    this.plot?.destroy();
    this.element.remove();
  }

  /**
   * Draws. `data` is [x, values, ...], and `series` has {name, colour, band?: [lowest, highest]} for
   * each column of values; `band` are indices of columns that bound it.
   */
  draw(data, series) {
    this.data = data;
    const shape = JSON.stringify(series);
    if (shape !== this.shape) {
      this.shape = shape;
      this.series = series;
      this.#rebuild();
    } else {
      this.plot?.setData(this.#drawable(), !this.zoomed);
    }
    const points = data[0].length;
    this.nothing.hidden = points > 0;
    mark(this.element, "data-empty", points > 0 ? null : "yes");
    this.#describe();
    this.#show(null);
  }

  /** What it says while it has no points. */
  set empty(text) {
    say(this.nothing, text);
  }

  /** Draws again: colours or the range changed. */
  redraw() {
    if (this.data) this.#rebuild();
  }

  /** A button that switches a property of this chart. */
  #button(text, title, what, property) {
    const button = make("button", { type: "button", class: "small", "aria-pressed": "false", "aria-label": `${what} of ${this.options.title}`, title }, text);
    button.addEventListener("click", () => {
      this[property] = !this[property];
      mark(button, "aria-pressed", this[property]);
      this.redraw();
    });
    return button;
  }

  /** What is drawn of the data: moving averages if they are wanted, but no band of them. */
  get #values() {
    const [x, ...columns] = this.data;
    return this.smooth ? [x, ...columns.map((column, place) => (this.series[place].edge ? column : smoothed(column, SMOOTHING)))] : this.data;
  }

  #drawable() {
    if (!this.logarithmic) return this.#values;
    const [x, ...columns] = this.#values;
    return [x, ...columns.map((column) => column.map((value) => (value > 0 ? value : null)))];
  }

  #fit() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (width < 20 || height < 20) return; // not in sight
    if (!this.plot) this.#rebuild();
    else if (this.plot.width !== width || this.plot.height !== height) this.plot.setSize({ width, height });
  }

  #rebuild() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!this.data || width < 20 || height < 20) return;
    this.plot?.destroy();
    this.zoomed = false;
    this.canvas.replaceChildren();
    this.plot = new uPlot(this.#configuration(width, height), this.#drawable(), this.canvas);
    this.#legend();
  }

  #configuration(width, height) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const font = "11px system-ui, sans-serif";
    const line = { stroke: colour("--muted"), font, ticks: { show: false } };
    const { tick = this.options.format, axisFormat } = this.options;
    return {
      width,
      height,
      legend: { show: false },
      padding: [10, 12, 0, 0],
      cursor: {
        y: false,
        sync: { key: `${SYNC}:${this.options.axis}` },
        points: { size: 7 },
        drag: { x: true, y: false },
      },
      scales: {
        x: { time: false, range: (_, low, high) => within(low, high) },
        y: { distr: this.logarithmic ? 3 : 1, ...(this.logarithmic ? {} : { range: (_, low, high) => this.#height(low, high) }) },
      },
      axes: [
        { ...line, size: 26, gap: 6, space: 60, grid: { show: false }, incrs: WHOLE, values: (_, splits) => splits.map((x) => axisFormat(x)) },
        { ...line, size: 52, gap: 8, space: 34, grid: { stroke: colour("--grid"), width: 1 }, values: (_, splits) => splits.map((y) => (y === null ? "" : tick(y))) },
      ],
      series: [{}, ...this.series.map((each) => this.#line(each, colour))],
      bands: this.series.flatMap(({ band, colour: name }) =>
        band ? [{ series: [band[1], band[0]], fill: `${colour(name)}2e` }] : [],
      ),
      hooks: {
        setCursor: [(plot) => this.#show(plot.cursor.idx)],
        setSelect: [(plot) => (this.zoomed ||= plot.select.width > 0)],
        draw: [(plot) => drawMarks(plot, colour)],
        ready: [(plot) => plot.over.addEventListener("dblclick", () => (this.zoomed = false))],
      },
    };
  }

  #line({ colour: name, edge, dashed }, colour) {
    // The edge of a band has no line of its own.
    if (edge) return { show: true, width: 0, stroke: "transparent", points: { show: false }, spanGaps: true };
    return {
      stroke: colour(name),
      width: 1.75,
      dash: dashed ? [6, 4] : undefined,
      points: { show: (plot) => plot.data[0].length < 2, size: 6 },
      spanGaps: true,
    };
  }

  #height(low, high) {
    if (low === null || high === null) return [0, 1];
    if (this.options.zero) return [0, high > 0 ? high * 1.12 : 1];
    const room = (high - low || Math.abs(high) || 1) * 0.08;
    return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  }

  #legend() {
    this.values = this.series.map(() => make("span", { class: "value" }, NONE));
    const items = this.series.flatMap((each, index) => {
      if (each.edge) return [];
      const swatch = make("span", { class: each.dashed ? "swatch dashed" : "swatch" });
      swatch.style.setProperty("--swatch", `var(${each.colour})`);
      return [make("li", { title: each.name }, swatch, make("span", { class: "name" }, each.name), this.values[index])];
    });
    fill(this.legend, items);
    this.#show(null);
  }

  /** Shows the values at a place of the cursor, or the last ones. */
  #show(index) {
    if (!this.values) return;
    const [, ...columns] = this.#values;
    columns.forEach((column, place) => {
      const at = index ?? column.length - 1;
      say(this.values[place], this.options.format(nearest(column, at)));
    });
  }

  #describe() {
    const { title, unit, axis, axisFormat, format } = this.options;
    const x = this.data[0];
    if (!x.length) return;
    const parts = this.series.flatMap((each, place) => {
      const column = this.data[place + 1];
      const values = column.filter((value) => value !== null && Number.isFinite(value));
      if (each.edge || !values.length) return [];
      const extreme = (pick) => format(values.reduce((a, b) => pick(a, b)));
      return [
        `${each.name} from ${format(values[0])} to ${format(values.at(-1))}, lowest ${extreme(Math.min)}, highest ${extreme(Math.max)}`,
      ];
    });
    const text = `${title}${unit ? ` in ${unit}` : ""}, ${axis} ${axisFormat(x[0])} to ${axisFormat(x.at(-1))}: ${parts.join("; ")}`;
    mark(this.canvas, "aria-label", text);
  }
}

const WHOLE = [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5, 6, 7, 8].map((e) => n * 10 ** e)).sort((a, b) => a - b);

function within(low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) return [low - 1, high + 1];
  return shared.range && high - low > shared.range ? [high - shared.range, high] : [low, high];
}

function nearest(column, index) {
  for (let at = index; at >= 0; at -= 1) if (column[at] !== null && column[at] !== undefined) return column[at];
  return null;
}

function drawMarks(plot, colour) {
  const { ctx: pen, bbox } = plot;
  pen.save();
  pen.lineWidth = devicePixelRatio;
  pen.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const { step, colour: name } of shared.marks) {
    const x = Math.round(plot.valToPos(step, "x", true)) + 0.5;
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    pen.strokeStyle = colour(name);
    pen.beginPath();
    pen.moveTo(x, bbox.top);
    pen.lineTo(x, bbox.top + bbox.height);
    pen.stroke();
  }
  pen.restore();
}
