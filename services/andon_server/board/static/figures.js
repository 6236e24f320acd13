// The last step in figures, and the last steps as a table.

import { byId, fill, make, mark, say } from "./dom.js";
import { sessionFigures } from "./session.js";
import { NONE, clock, count, figure, percent, rate, span } from "./words.js";

const CELLS = ["Loss", "Throughput", "Step time", "Exchange", "Checkpoint"];
const ROWS = 20;
const HEADINGS = ["Step", "Loss", "Accuracy", "Step time", "Samples/s", "Gradient norm", "At"];

/** Shows the figures; before the first step they are dashes of the same size. */
export function showFigures(state) {
  const place = byId("figures");
  const session = state?.session ? sessionFigures(state) : null;
  const names = session?.map(([name]) => name) ?? CELLS;
  if (place.dataset.names !== String(names)) {
    place.dataset.names = String(names);
    mark(place, "aria-label", session ? "The session" : "The last step");
    fill(place, names.map((name) => make("div", { class: "cell" }, make("dt", {}, name), make("dd", {}, make("strong", {}, NONE), make("span", { class: "of" }, ""), make("small", {}, "\u00a0")))));
  }
  const cells = session ? session.map(([, ...cell]) => cell) : state ? [loss(state), throughput(state), stepTime(state), exchange(state), checkpoint(state)] : CELLS.map(() => [NONE, "", ""]);
  cells.forEach(([value, unit, note], index) => {
    const [strong, of, small] = place.children[index].lastElementChild.children;
    say(strong, value);
    say(of, value === NONE ? "" : unit);
    say(small, note || "\u00a0");
    mark(small, "title", note || null);
  });
}

function loss(state) {
  return [figure(state.loss), "", state.accuracy === null ? "of the last step" : `${(state.accuracy * 100).toFixed(1)}\u202f% right`];
}

function throughput({ samples_per_second: speed, live }) {
  return speed > 0 ? [rate(speed), "samples/s", live > 1 ? `${rate(speed / live)} a worker` : "one worker"] : [NONE, "", ""];
}

function stepTime({ step_seconds: seconds }) {
  const [value, unit] = split(span(seconds));
  return [value, unit, seconds ? `${rate(1 / seconds)} steps/s` : ""];
}

function exchange({ exchange_s: seconds, hidden_ratio: hidden }) {
  if (!(seconds > 0)) return [NONE, "", ""];
  const [value, unit] = split(span(seconds));
  return [value, unit, `${percent(hidden)} hidden by backward`];
}

function checkpoint({ checkpoints: known }) {
  if (!known) return [NONE, "", "not written by this run"];
  const next = known.overdue ? `step ${count(known.overdue)} is overdue` : known.every ? `every ${count(known.every)} steps` : "";
  return [known.step ? count(known.step) : NONE, "step", next];
}

function split(text) {
  const [value, unit = ""] = text.split("\u202f");
  return [value, unit];
}

/** The last steps as a table, newest first; built only while somebody looks at it. */
export function showSteps(curves) {
  if (!byId("steps").open) return;
  const place = byId("steps-table");
  const { steps } = curves;
  const full = new Map(curves.recent.map((point) => [point[0], point]));
  const rows = [];
  for (let at = steps.step.length - 1; at >= 0 && rows.length < ROWS; at -= 1) {
    const [, , , , accuracy = null, norm = null] = full.get(steps.step[at]) ?? [];
    rows.push([count(steps.step[at]), figure(steps.loss[at]), accuracy === null ? NONE : `${(accuracy * 100).toFixed(1)}\u202f%`,
      span(steps.step_seconds[at]), rate(steps.samples_per_second[at]), figure(norm), clock(steps.at_unix_s[at])]);
  }
  if (!rows.length) {
    fill(place, make("p", { class: "nothing" }, "No step is committed yet."));
    return;
  }
  fill(place, make("table", { class: "table" },
    make("caption", { class: "hush" }, `The last ${rows.length} steps, newest first`),
    make("thead", {}, make("tr", {}, HEADINGS.map((name) => make("th", { scope: "col", class: "number" }, name)))),
    make("tbody", {}, rows.map(([first, ...rest]) => make("tr", {}, make("th", { scope: "row", class: "number" }, first), rest.map((cell) => make("td", { class: "number" }, cell)))))));
}
