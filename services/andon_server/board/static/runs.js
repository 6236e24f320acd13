// The runs that the service knows from their journals: a list, one of them, and two over each other.

import { read, reason } from "./api.js";
import { showMarks } from "./chart.js";
import { Curves } from "./curves.js";
import { byId, fill, make } from "./dom.js";
import { Events, showEvents } from "./events.js";
import { ComparedCharts, RunCharts } from "./panels.js";
import { NONE, clock, count, date, duration, figure, lightOf, plain, stateWord } from "./words.js";

let drawn = null; // the charts in sight

/** Takes the charts of these pages away. */
export function leaveRuns() {
  drawn?.close();
  drawn = null;
}

function badge(state) {
  return make("span", { class: "badge", data: { light: lightOf(state) } }, make("span", { class: "bead", "aria-hidden": "true" }), stateWord(state));
}

/** The list, with a box for each of two runs to compare. */
export async function showRuns() {
  const place = byId("view-runs");
  const title = make("h1", { tabindex: "-1" }, "Runs");
  const runs = await attempt(place, title, () => read("runs"));
  if (!runs) return;
  if (!runs.length) {
    fill(place, title, make("p", { class: "nothing" }, "There is no other run beside this one. Runs in the same folder (runs/) are listed here."));
    return;
  }
  const chosen = new Set();
  const go = make("button", { type: "button", class: "button solid", disabled: true }, "Compare");
  const note = make("p", { class: "dim", role: "status" }, "Choose two runs to lay their curves over each other.");
  const boxes = [];
  const choose = (box) => {
    if (box.checked) chosen.add(box.value);
    else chosen.delete(box.value);
    go.disabled = chosen.size !== 2;
    for (const each of boxes) each.disabled = chosen.size >= 2 && !each.checked;
    note.textContent = chosen.size === 2 ? `Runs ${[...chosen].join(" and ")}.` : chosen.size ? "One more." : "Choose two runs to lay their curves over each other.";
  };
  go.addEventListener("click", () => (location.hash = `#/compare/${[...chosen].map(encodeURIComponent).join("/")}`));
  const rows = runs.map((run) => {
    const box = make("input", { type: "checkbox", value: run.run_id, "aria-label": `compare run ${run.run_id}`, on: { change: () => choose(box) } });
    boxes.push(box);
    const cell = (heading, content, kind = "") => make("td", { role: "cell", data: { title: heading }, class: kind }, content);
    return make("tr", { role: "row" }, cell("Compare", make("label", { class: "tick" }, box)),
      make("th", { scope: "row", role: "rowheader", class: "run", data: { title: "Run" } }, make("a", { href: run.current ? "#/" : `#/runs/${encodeURIComponent(run.run_id)}`, class: "cut", title: run.run_id }, run.run_id), run.current ? make("span", { class: "tag" }, "this line") : null),
      cell("State", badge(run.state)), cell("Started", run.started_unix_s ? date(run.started_unix_s) : NONE),
      cell("Time", timeOf(run), "number"), cell("Steps", count(run.steps), "number"), cell("Loss", figure(run.loss), "number"),
      cell("Workers", count(run.workers), "number"), cell("Halts", haltsOf(run.halts), "number"));
  });
  fill(place, make("div", { class: "heading" }, title, make("div", { class: "row" }, note, go)),
    make("table", { class: "table cards runs", role: "table", "aria-label": "Runs, newest first" },
      make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ["Compare", "Run", "State", "Started", "Time", "Steps", "Loss", "Workers", "Halts"].map((name, index) =>
        make("th", { role: "columnheader", scope: "col", class: index > 3 ? "number" : null }, index ? name : make("span", { class: "hush" }, name))))),
      make("tbody", { role: "rowgroup" }, rows)));
}

/** One run: its curves, its halts with their answers, and what happened. */
export async function showRun(id) {
  const place = byId("view-run");
  const title = make("h1", { tabindex: "-1" }, "Run ", make("span", { class: "name" }, id));
  const back = make("p", {}, make("a", { href: "#/runs" }, "All runs"));
  const path = `runs/${encodeURIComponent(id)}`;
  const found = await attempt(place, title, () => Promise.all([read(path), read(`${path}/curves?points=600`)]));
  if (!found) return;
  const [{ run, events, halts }, fetched] = found;
  const curves = new Curves();
  curves.load(fetched);
  const known = new Events();
  known.add(events);
  const charts = make("div", { class: "charts" });
  const feed = make("div", { class: "feed", tabindex: "0", role: "region", "aria-label": "What happened" });
  fill(place, back, make("div", { class: "heading" }, title, badge(run.state)), summary([{ run, curves }]),
    halts.length ? make("section", {}, make("div", { class: "heading" }, make("h2", {}, "Halts")), make("ol", { class: "past" }, halts.map(pastHalt))) : null,
    make("div", { class: "columns" }, make("section", { class: "curves" }, make("div", { class: "heading" }, make("h2", {}, "Curves")), charts),
      make("section", { class: "events" }, make("div", { class: "heading" }, make("h2", {}, "What happened")), feed)));
  showEvents(feed, known);
  showMarks(known.marks);
  drawn = new RunCharts(charts);
  drawn.expect(curves.last, { logs: !curves.last && curves.scalars.size > 0 });
  drawn.draw(curves);
}

/** Two runs over each other, by step or by time. */
export async function showCompared(ids) {
  const place = byId("view-compare");
  const title = make("h1", { tabindex: "-1" }, "Compare ", ...ids.flatMap((id, index) => [index ? " and " : "", make("span", { class: "name" }, id)]));
  const found = await attempt(place, title, () => Promise.all(ids.map(async (id) => {
    const path = `runs/${encodeURIComponent(id)}`;
    const [{ run }, fetched] = await Promise.all([read(path), read(`${path}/curves?points=600`)]);
    const curves = new Curves();
    curves.load(fetched);
    return { name: run.run_id, run, curves };
  })));
  if (!found) return;
  const charts = make("div", { class: "charts" });
  drawn = new ComparedCharts(charts);
  const buttons = [["step", "By step"], ["time", "By time since start"]].map(([by, name], index) =>
    make("button", { type: "button", "aria-pressed": index === 0, data: { by } }, name));
  for (const button of buttons) {
    button.setAttribute("aria-pressed", String(button.dataset.by === "step"));
    button.addEventListener("click", () => {
      for (const each of buttons) each.setAttribute("aria-pressed", String(each === button));
      drawn.draw(found, button.dataset.by);
    });
  }
  fill(place, make("p", {}, make("a", { href: "#/runs" }, "All runs")), make("div", { class: "heading" }, title, make("div", { class: "choice", role: "group", "aria-label": "Horizontal axis" }, buttons)),
    summary(found), charts);
  drawn.draw(found, "step");
}

function summary(runs) {
  const lines = [
    ["State", ({ run }) => stateWord(run.state)],
    ["Started", ({ run }) => (run.started_unix_s ? date(run.started_unix_s) : NONE)],
    ["Time", ({ run }) => timeOf(run)],
    ["Steps", ({ run }) => count(run.steps)],
    ["Last loss", ({ run }) => figure(run.loss)],
    ["Lowest loss", ({ curves }) => lowest(curves.steps.loss_min)],
    ["Workers", ({ run }) => count(run.workers)],
    ["Halts", ({ run }) => haltsOf(run.halts)],
  ];
  if (runs.length === 1) {
    // Its state stands beside the title.
    return make("dl", { class: "figures thin", "aria-label": "The run in figures" }, lines.slice(1).map(([name, of]) => make("div", { class: "cell" }, make("dt", {}, name), make("dd", {}, make("strong", {}, of(runs[0]))))));
  }
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "The runs in figures" },
    make("table", { class: "table" }, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "Run"), lines.map(([name]) => make("th", { scope: "col", class: "number" }, name)))),
      make("tbody", {}, runs.map((each, index) => {
        const swatch = make("span", { class: index === 1 ? "swatch dashed" : "swatch" });
        swatch.style.setProperty("--swatch", `var(--series-${index + 1})`);
        return make("tr", {}, make("th", { scope: "row" }, swatch, " ", make("a", { href: `#/runs/${encodeURIComponent(each.name)}` }, each.name)), lines.map(([, of]) => make("td", { class: "number" }, of(each))));
      }))));
}

function pastHalt(halt) {
  const by = halt.operator ? ` by ${halt.operator}` : "";
  const dropped = halt.dropped === null || halt.dropped === undefined ? "" : ` worker ${halt.dropped}`;
  return make("li", {}, make("p", {}, halt.sentence), make("p", { class: "dim" }, `${plain(halt.reason)} · ${clock(halt.at_unix_s)} · `,
    halt.ended_session ? "it ended the session" : halt.answer ? `answered${by}: ${halt.answer}${dropped}` : "not answered"));
}

/** From the run's first record to its last one, with all waits, as `andon history` has it. */
function timeOf(run) {
  return run.steps ? duration(run.seconds) : NONE;
}

function haltsOf(halts) {
  return count(Array.isArray(halts) ? halts.length : (halts ?? 0));
}

function lowest(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? figure(known.reduce((a, b) => Math.min(a, b))) : NONE;
}

async function attempt(place, title, load) {
  leaveRuns();
  fill(place, title, make("p", { class: "nothing", role: "status" }, "Reading the journals …"));
  try {
    return await load();
  } catch (error) {
    fill(place, title, make("p", { class: "notice", role: "alert" }, reason(error)), make("p", {}, make("a", { href: "#/runs" }, "All runs")));
    return null;
  }
}

