// The board: follows one line and shows it. Each file beside this one is one part of the page.

import { post, read, reason } from "./api.js";
import { ask } from "./ask.js";
import { showMarks, showRange } from "./chart.js";
import { Curves } from "./curves.js";
import { byId, mark, say } from "./dom.js";
import { Events, showEvents } from "./events.js";
import { showFigures, showSteps } from "./figures.js";
import { showHalt } from "./halt.js";
import { lineLight, showLight } from "./light.js";
import { LiveFeed } from "./live.js";
import { showLogin } from "./login.js";
import { RunCharts } from "./panels.js";
import { showRanks } from "./ranks.js";
import { leaveRuns, showCompared, showRun, showRuns } from "./runs.js";
import { showEnd } from "./session.js";
import { showWorkers } from "./workers.js";

const curves = new Curves();
const events = new Events();
const charts = new RunCharts(byId("charts"));
const feed = new LiveFeed(receive, hear);

let state = null;
let signal = { kind: "connecting" };
let view = "line";
let loading = null; // the run whose curves are under way
let due = new Set(); // parts to draw in the next frame
let spoken = "";

// ---------------------------------------------------------------- what the service says

function receive(event, data) {
  if (event === "state") {
    const other = state && state.run_id !== data.run_id;
    state = data;
    if (other) {
      curves.clear();
      events.clear();
    }
    if (other || !loading) load();
    draw("state");
  } else if (event === "points") {
    curves.add(data);
    if (curves.heavy) load();
    draw("curves");
  } else if (event === "event") {
    events.add([data]);
    if (data.kind === "went_back" && state) {
      curves.clear(); // Some of these steps are no part of the run any more.
      load();
    }
    draw("events");
  }
}

function hear(now) {
  const before = signal.kind;
  signal = now;
  // After a gap everything is fetched again: the line may have gone on without us.
  if (now.kind === "live" && before !== "live") loading = null;
  if (now.kind === "refused") login(now.error.message);
  draw("state");
}

async function load() {
  const run = state.run_id;
  loading = run;
  curves.live = 0;
  try {
    const path = `runs/${encodeURIComponent(run)}`;
    const [fetched, past] = await Promise.all([read(`${path}/curves?points=600`), read(path)]);
    if (state.run_id !== run) return;
    curves.load(fetched);
    events.add(past.events);
    draw("curves", "events");
  } catch {
    // A later state tries again, and not each of them: the service may be busy with its journal.
    setTimeout(() => {
      if (loading === run) loading = null;
    }, 3000);
  }
}

// ---------------------------------------------------------------- the page

/**
 * Draws parts in the next frame: many messages make one drawing. A tab in the background has no
 * frames, and its title and icon are then all that can be seen.
 */
function draw(...parts) {
  if (!due.size) {
    if (document.hidden) setTimeout(paint, 200);
    else requestAnimationFrame(paint);
  }
  for (const part of parts) due.add(part);
}

document.addEventListener("visibilitychange", paint);

function paint() {
  const parts = due;
  if (!parts.size) return;
  due = new Set();
  const heard = signal.kind === "live";
  if (parts.has("state")) {
    showLight(state, signal);
    showFigures(state);
    charts.expect(state?.step ?? 0, { logs: Boolean(state?.session) });
    showParts();
    if (state?.session) {
      showRanks(state, heard);
      showEnd(state.session);
    } else {
      showWorkers(state, heard);
      showHalt(state, heard, () => login(""));
    }
    showRunning();
    showSignal(heard);
    speak();
  }
  if (view !== "line") return;
  if (parts.has("curves") || parts.has("all")) {
    charts.draw(curves);
    showSteps(curves);
  }
  if (parts.has("events") || parts.has("all")) {
    showEvents(byId("feed"), events);
    showMarks(events.marks);
  }
}

/** Takes away what only lines have, and names the rows. */
function showParts() {
  const session = Boolean(state?.session);
  for (const part of document.querySelectorAll("[data-of=line]")) part.hidden = session;
  say(document.querySelector("[data-tab=line]"), session ? "Session" : "Line");
  say(byId("workers-title"), session ? "Ranks" : "Workers");
  mark(byId("workers"), "data-rows", session ? "ranks" : null);
}

/** What runs, and where its service is: `run 7f3a · train.py · alpha`. */
function showRunning() {
  const text = state ? [`run ${state.run_id}`, state.script, state.host].filter(Boolean).join(" · ") : "";
  say(byId("running"), text);
  mark(byId("running"), "title", text || null);
}

function showSignal(heard) {
  const words = { connecting: "Connecting", live: "Live", refused: "Not logged in" };
  mark(byId("signal"), "data-signal", signal.kind);
  let text = words[signal.kind];
  if (signal.kind === "lost") {
    const rest = Math.max(0, Math.ceil((signal.retryAt - Date.now()) / 1000));
    text = rest > 1 ? `No connection, again in ${rest} s` : "Reconnecting";
  }
  say(byId("signal-text"), text);
  const operates = heard && state?.may_operate;
  // Only a session that goes on can be halted, and none can be drained.
  const runs = ["RUNNING", ...(state?.session ? [] : ["FORMING", "SYNCING"])].includes(state?.state);
  byId("halt-button").hidden = !(operates && runs);
  byId("drain").hidden = !(operates && runs && !state.session);
  byId("login-button").hidden = !(heard && state?.needs_login && view !== "login");
  byId("logout-button").hidden = !(heard && sessionStorage.getItem("logged-in"));
}

setInterval(() => signal.kind === "lost" && draw("state"), 1000);

/** Tells screen readers what changed: a halt and a lost line at once, the rest when they are idle. */
function speak() {
  const { light, word, why } = lineLight(state, signal);
  const key = `${word} ${state?.halt?.id ?? ""} ${state?.run_id ?? ""}`;
  if (key === spoken) return;
  const first = !spoken;
  spoken = key;
  const loud = light === "red" || (signal.kind === "lost" && !first);
  say(byId(loud ? "alarm" : "spoken"), `The ${state?.session ? "session" : "line"}: ${word}. ${why}`);
  if (!loud) say(byId("alarm"), "");
}

// ---------------------------------------------------------------- views and buttons

const VIEWS = ["line", "runs", "run", "compare", "login"];

function show(name) {
  view = name;
  for (const each of VIEWS) byId(`view-${each}`).hidden = each !== name;
  for (const tab of document.querySelectorAll("[data-tab]")) {
    const current = tab.dataset.tab === name || (tab.dataset.tab === "runs" && ["run", "compare"].includes(name));
    mark(tab, "aria-current", current ? "page" : null);
  }
}

async function route({ focus = true } = {}) {
  const { hash } = location;
  if (hash && !hash.startsWith("#/")) return; // a place in the page
  const [name = "", ...rest] = hash.slice(2).split("/").map(decodeURIComponent);
  leaveRuns();
  showMarks([]);
  if (name === "runs" && rest[0]) {
    show("run");
    await showRun(rest[0]);
  } else if (name === "runs") {
    show("runs");
    await showRuns();
  } else if (name === "compare" && rest.length === 2) {
    show("compare");
    await showCompared(rest);
  } else {
    show("line");
    draw("state", "all");
  }
  if (focus) byId(`view-${view}`).querySelector("h1[tabindex]")?.focus();
}

function login(why) {
  leaveRuns();
  show("login");
  showLogin(why, () => {
    sessionStorage.setItem("logged-in", "yes");
    loading = null;
    feed.restart();
    route();
  });
  draw("state");
}

async function act(question, path, body) {
  const answer = await ask(question);
  if (!answer) return;
  try {
    await post(path, body(answer));
    say(byId("spoken"), "Done.");
  } catch (error) {
    await ask({ title: "That did not happen", effect: reason(error), yes: "Close" });
  }
}

byId("halt-button").addEventListener("click", () =>
  act({
    ...(state.session
      ? { title: "Halt the session?", effect: "All ranks raise an error with your reason, and end with code 3. To go on, start them again." }
      : { title: "Halt the line?", effect: "All workers stop before the next commit and wait, with their weights, until somebody answers." }),
    write: { label: "Why", hint: "the loss looks wrong" },
    yes: "Halt",
    danger: true,
  }, "halt", ({ written }) => ({ reason: written })));

byId("drain").addEventListener("click", () =>
  act({
    title: "Drain the line?",
    effect: "The workers finish their step, write a checkpoint and leave. The run is over then; it can be resumed from the checkpoint.",
    yes: "Drain",
    danger: true,
  }, "drain", () => ({})));

byId("login-button").addEventListener("click", () => login(""));
byId("logout-button").addEventListener("click", async () => {
  try {
    await post("logout", {});
  } finally {
    sessionStorage.removeItem("logged-in");
    location.reload(); // nothing of the run stays in the page
  }
});
byId("jump").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
for (const button of document.querySelectorAll("[data-range]")) {
  button.addEventListener("click", () => {
    for (const each of document.querySelectorAll("[data-range]")) mark(each, "aria-pressed", each === button);
    showRange(Number(button.dataset.range));
  });
}
byId("steps").addEventListener("toggle", () => showSteps(curves));
addEventListener("hashchange", () => route());

route({ focus: false });
draw("state", "all");
feed.follow();
