// The light of the line: its state in one word and one colour, also in the tab's title and icon.

import { byId, keep, make, mark, say } from "./dom.js";
import { rankLight, sessionLight } from "./session.js";
import { LIGHTS, STATES, count, duration, listed, several } from "./words.js";

const ICON_COLOURS = { green: "#2fb463", amber: "#f5a524", red: "#e5484d", blue: "#4c8dff", off: "#8b929c" };
const QUIET_S = 5; // a heartbeat older than this is worth a warning: they come every second

/**
 * The line as a person sees it: {light, word, why, title}.
 *
 * A state counts only while the line is heard. Without it the light is off, whatever it was before;
 * only a complete run stays complete, and a session that is over stays over.
 */
export function lineLight(state, signal) {
  const heard = signal.kind === "live";
  if (state?.session && (heard || state.session.phase === "over")) {
    const shown = sessionLight(state);
    return heard ? shown : { ...shown, why: `${shown.why} Its service has ended.` };
  }
  if (heard && state) {
    return { light: LIGHTS[state.state] ?? "off", word: STATES[state.state] ?? state.state, why: whyOf(state) };
  }
  if (state?.state === "COMPLETE") {
    return { light: "blue", word: "Complete", why: `${endOf(state)} Its service has ended.` };
  }
  const last = state
    ? `When last heard it was ${wordOf(state).toLowerCase()} at step ${count(state.step)}.`
    : "";
  if (signal.kind === "connecting") return { light: "off", word: "Connecting", why: "The board asks the line for its state." };
  if (signal.failures > 2) {
    return { light: "off", word: "No signal", why: `The line's service does not answer. ${last} The board goes on asking.` };
  }
  return { light: "off", word: "Reconnecting", why: `The connection to the line broke. ${last}` };
}

function wordOf(state) {
  return state.session ? sessionLight(state).word : (STATES[state.state] ?? state.state);
}

/** The light of one worker, and its word. */
export function workerLight(worker, state) {
  if (!worker.live) {
    if (state.state === "COMPLETE") return ["blue", "done"];
    return ["off", worker.notice ? "left by notice" : "gone"];
  }
  if (state.state === "HALTED") return worker.worker === state.halt?.worker ? ["red", "named by the halt"] : ["amber", "waits for an answer"];
  if (worker.heartbeat_age_s > QUIET_S) return ["amber", `silent for ${duration(worker.heartbeat_age_s)}`];
  const word = worker.activity || "here";
  if (state.state === "FORMING" || worker.activity === "syncing") return ["amber", word];
  if (state.state === "COMPLETE") return ["blue", word];
  return worker.notice ? ["amber", `leaves, ${word}`] : ["green", word];
}

/** Shows the light, the way to the end and a light for each worker. */
export function showLight(state, signal) {
  const { light, word, why } = lineLight(state, signal);
  const heard = signal.kind === "live";
  mark(document.body, "data-light", light);
  mark(document.body, "data-heard", heard ? "yes" : "no");
  say(byId("light-word"), word);
  say(byId("light-why"), why);
  showTab(state, light, word);
  if (!state) return;
  say(byId("way-step"), state.total_steps ? `${count(state.step)} / ${count(state.total_steps)}` : count(state.step));
  say(byId("way-eta"), wayNote(state, heard));
  const bar = byId("way-bar");
  bar.hidden = !state.total_steps;
  if (state.total_steps) bar.value = Math.min(1, state.step / state.total_steps);
  mark(byId("stations"), "aria-label", `A light for each ${state.session ? "rank" : "worker"}`);
  if (state.session) {
    showRankStations(state.session, heard);
    return;
  }
  keep(byId("stations"), state.workers, (worker) => worker.worker, station, (element, worker) => {
    const [colour, said] = heard || state.state === "COMPLETE" ? workerLight(worker, state) : ["off", "not heard"];
    mark(element, "data-light", colour);
    mark(element, "data-holds", heard && worker.holds_up ? "yes" : null);
    const text = `worker ${worker.worker}: ${said}${worker.holds_up ? ", holds the others up" : ""}`;
    mark(element, "title", text);
    say(element.firstElementChild, worker.worker);
    say(element.lastElementChild, text);
  });
}

function showRankStations(session, heard) {
  keep(byId("stations"), session.ranks, (rank) => rank.rank, station, (element, rank) => {
    const [colour, said] = heard || session.phase === "over" ? rankLight(rank, session) : ["off", "not heard"];
    mark(element, "data-light", colour);
    mark(element, "data-holds", null);
    const text = `rank ${rank.rank}: ${said}`;
    mark(element, "title", text);
    say(element.firstElementChild, rank.rank);
    say(element.lastElementChild, text);
  });
}

/** Who waits for whom, as a sentence; empty if nobody waits. */
function waitingSentence(state) {
  const slow = state.workers.find((worker) => worker.live && worker.holds_up);
  if (!slow) return "";
  const waiting = state.workers.filter((worker) => worker.live && worker !== slow);
  const most = Math.max(...waiting.map((worker) => worker.waiting_ratio));
  const others = listed(waiting.map((worker) => worker.worker));
  const noun = waiting.length === 1 ? "worker" : "workers";
  if (waiting.length > 6) return `Worker ${slow.worker} holds the others up: they wait up to ${Math.round(most * 100)} % of their time.`;
  return `Worker ${slow.worker} holds the others up: ${noun} ${others} wait${waiting.length === 1 ? "s" : ""} up to ${Math.round(most * 100)} % of the time.`;
}

function station() {
  return make("li", { class: "station" }, make("span", { "aria-hidden": "true" }), make("span", { class: "hush" }));
}

function wayNote(state, heard) {
  if (state.session) return state.step === 1 ? "step" : "steps";
  if (state.state === "COMPLETE") return state.total_steps ? "steps" : "steps, all done";
  if (heard && state.state === "RUNNING" && state.eta_s !== null) return `steps, ${duration(state.eta_s)} left`;
  if (heard && state.state === "HALTED" && state.halt) {
    return `steps, halted for ${duration(state.server_unix_s - state.halt.at_unix_s)}`;
  }
  return `${state.step === 1 && !state.total_steps ? "step" : "steps"}, epoch ${state.epoch}`;
}

function whyOf(state) {
  const people = `${count(state.live)} of ${several(Math.max(state.expect_workers, state.live), "worker")}`;
  switch (state.state) {
    case "RUNNING":
      if (state.live < state.expect_workers) return `${people} train${state.live === 1 ? "s" : ""}. The line goes on without the others.`;
      return waitingSentence(state) || `${several(state.participating || state.live, "worker")} train${state.live === 1 ? "s" : ""} together.`;
    case "FORMING":
      return state.waiting_for ? `It waits for ${state.waiting_for}.` : `${people} are here.`;
    case "SYNCING":
      return state.waiting_for ? `It waits for ${state.waiting_for}.` : "Workers receive the line's state.";
    case "DRAINING":
      return "The workers finish their step, write a checkpoint and leave.";
    case "COMPLETE":
      return endOf(state);
    case "HALTED":
      return sentenceOf(state.halt);
    default:
      return "";
  }
}

/** A halt in words. The state's word stands above it already. */
function sentenceOf(halt) {
  return halt ? halt.sentence.replace(/^HALTED at /, "At ") : "The line waits for a person's answer.";
}

function endOf(state) {
  const why = state.stop_reason;
  if (why && why !== "steps" && why !== "epochs") return `The run ended at step ${count(state.step)}: ${why}.`;
  return `The run is over, after ${several(state.step, "step")}.`;
}

let tab = "";

function showTab(state, light, word) {
  const run = state ? ` · run ${state.run_id}` : "";
  const stopped = state?.session ? word.toUpperCase() : "HALTED";
  const loud = light === "red" ? `${stopped} at step ${state?.halt?.step ?? state?.step}` : word;
  const step = light === "green" ? ` ${count(state.step)}` : "";
  const title = `${loud}${step}${run} · Andon`;
  if (document.title !== title) document.title = title;
  if (tab === light) return;
  tab = light;
  const colour = ICON_COLOURS[light];
  // Shape as well as colour: a square is a stop.
  const shape =
    light === "red"
      ? `<rect x="3" y="3" width="26" height="26" rx="4" fill="${colour}"/><path d="M16 8v10" stroke="#fff" stroke-width="4"/><circle cx="16" cy="24" r="2.4" fill="#fff"/>`
      : light === "off"
        ? `<circle cx="16" cy="16" r="11" fill="none" stroke="${colour}" stroke-width="5"/>`
        : `<circle cx="16" cy="16" r="13" fill="${colour}"/>`;
  const drawing = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">${shape}</svg>`;
  byId("favicon").href = `data:image/svg+xml,${encodeURIComponent(drawing)}`;
}

