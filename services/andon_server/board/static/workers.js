// The workers: a row for each, with what it does, how fast it is and how long it waits.

import { byId, make, mark, say } from "./dom.js";
import { workerLight } from "./light.js";
import { showOutput } from "./output.js";
import { Table, cut, lamp, measure, meter, text, twoLines } from "./table.js";
import { NONE, age, count, duration, listed, memory, percent, rate, several, tail } from "./words.js";

const table = new Table(
  [
    { key: "worker", title: "Worker", parts: () => [lamp(), make("span"), make("span", { class: "tag" }), outputButton()] },
    { key: "place", title: "Host and device", parts: twoLines },
    { key: "doing", title: "State", parts: twoLines },
    { key: "share", title: "Share", parts: meter },
    { key: "rate", title: "Samples/s", numeric: true, parts: cut },
    { key: "waits", title: "Waits", parts: meter },
    { key: "uses", title: "Uses", parts: twoLines },
    { key: "heartbeat", title: "Heartbeat", numeric: true, parts: cut },
  ],
  () => ["No worker has joined yet. On any host that reaches this one, start your script with ",
    make("code", {}, "ANDON_ADDRESS"), " set to the line's address, or use ", make("code", {}, "andon run"), "."],
);

/** Shows the table; without workers, how to start one. */
export function showWorkers(state, heard) {
  const workers = state?.workers ?? [];
  const known = { ...state, heard };
  const note = heard ? `${count(known.live)} live, ${count(known.participating)} in the round` : "as last heard";
  table.show(workers, (worker) => worker.worker, (element, worker) => refresh(element, worker, known), note);
  if (workers.length) showPlace(state);
}

function outputButton() {
  const show = (event) => showOutput(Number(event.currentTarget.closest("tr").dataset.key));
  return make("button", { type: "button", class: "small", hidden: true, on: { click: show } }, "output");
}

function refresh(element, worker, state) {
  const [light, said] = state.heard || state.state === "COMPLETE" ? workerLight(worker, state) : ["off", "not heard"];
  const [name, place, doing, share, speed, waits, uses, heartbeat] = element.children;
  mark(element, "data-light", light);
  mark(element, "data-holds", worker.holds_up ? "yes" : null);
  say(name.children[1], worker.worker);
  say(name.children[2], worker.holds_up ? "holds the others up" : worker.rank === null ? "" : `rank ${worker.rank}`);
  name.children[3].hidden = !state.keeps_output;
  mark(name.children[3], "aria-label", `output of worker ${worker.worker}`);
  text(place.children[0], worker.host || NONE);
  text(place.children[1], deviceOf(worker));
  text(doing.children[0], worker.detail ? `${said} (${worker.detail})` : said);
  text(doing.children[1], worker.notice ? `its machine goes: ${worker.notice}` : worker.slowness ? `was slow in step ${count(worker.slowness.step)}: ${worker.slowness.text}` : "");
  measure(share, worker.live ? worker.share : null);
  say(speed.firstElementChild, worker.live ? rate(worker.samples_per_second) : NONE);
  measure(waits, worker.live ? worker.waiting_ratio : null);
  say(uses.children[0], worker.live && worker.busy_cores !== null ? `${worker.busy_cores.toFixed(1)}\u202fcores` : NONE);
  say(uses.children[1], worker.live && worker.memory_bytes !== null ? memory(worker.memory_bytes) : "");
  say(heartbeat.firstElementChild, worker.live ? age(worker.heartbeat_age_s) : `${duration(worker.heartbeat_age_s)} ago`);
}

function deviceOf(worker) {
  const known = worker.hardware;
  if (!known?.name) return worker.device || "";
  const parts = [known.name];
  if (known.cores) parts.push(several(known.cores, "core"));
  if (known.memory_bytes) parts.push(memory(known.memory_bytes));
  return parts.join(", ");
}

function showPlace(state) {
  const whole = Math.max(1, state.reducers.reduce((sum, each) => sum + each.elements, 0));
  const missing = state.reducers.length < state.expect_reducers ? ` ${state.reducers.length} of ${state.expect_reducers} are there.` : "";
  const shared = state.reducers.length > 1 || state.expect_reducers > 1;
  const parts = state.reducers.map((each) => `${each.address || "the coordinator's"} ${percent(each.elements / whole)}`);
  const over = state.paths.length ? ` over ${listed(state.paths)}` : "";
  say(byId("exchange"), state.encoding ? `Gradients: ${state.encoding}${over}.` : "");
  say(byId("reducers"), shared ? `Reducers: ${listed(parts) || "none"}.${missing}` : "");
  const known = state.checkpoints;
  let text = "";
  if (known) {
    const by = known.writer === null ? "No worker here can write checkpoints" : `Worker ${known.writer} on ${known.host} writes checkpoints to ${tail(known.folder)}`;
    const last = known.step ? `the last is of step ${count(known.step)}` : "there is none yet";
    text = `${by}; ${last}.${known.overdue ? ` Step ${count(known.overdue)} should have one and has none.` : ""}`;
  }
  say(byId("checkpoints"), text);
  mark(byId("checkpoints"), "title", known?.folder || null);
  const uneven = state.schedule && !["equal", "even", "every-step"].includes(state.schedule);
  const schedule = uneven ? `Schedule: ${state.schedule}${state.schedule_note ? ` (${state.schedule_note})` : ""}.` : "";
  const differ = state.one_arithmetic || state.live < 2 ? "" : ", but the workers' arithmetics differ";
  const bits = state.grain ? `Same bits in grains of ${state.grain}${differ}.` : "";
  const noise = state.noise_scale === null ? "" : `Noise scale of the gradients: ${several(Math.round(state.noise_scale), "sample")}.`;
  say(byId("schedule"), [schedule, bits, verified(state.verification), parted(state.fragments), spiking(state.spikes), trimming(state.trimmed), noise, costing(state.cost)].filter(Boolean).join(" "));
}

/** What the run cost so far; empty without a price. */
export function costing(known) {
  if (!known || known.cost === null) return "";
  const unit = known.currency ? ` ${known.currency}` : "";
  const bought = [[known.samples_per_unit, "sample"], [known.tokens_per_unit, "token"]].filter(([many]) => many !== null);
  const worth = bought.length ? `: ${bought.map(([many, what]) => several(Math.round(many), what)).join(", ")} for 1${unit}` : "";
  return `Cost: ${known.cost.toFixed(2)}${unit} for ${(known.machine_seconds / 3600).toFixed(2)} machine hours${worth}.`;
}

/** What a trimmed mean left out in the last step; empty: the line trims nothing. */
export function trimming(trimmed) {
  if (!trimmed) return "";
  const { left_out: many } = trimmed;
  if (many === null) return "Trimmed mean.";
  if (many === 0) return "Trimmed mean, but the last step had too few contributions: it had the weighted one.";
  return `Trimmed mean: without the ${many} lowest and highest contributions to each element.`;
}

/** Which part of the model is exchanged; empty if it always is the whole. */
export function parted(fragments) {
  if (!fragments) return "";
  const { count: of, exchanged, mix } = fragments;
  const now = exchanged === null ? "the whole model is exchanged now" : `fragment ${exchanged + 1} is exchanged now`;
  return `Exchanged in ${of} fragments: ${now}${mix ? `, and workers keep ${percent(mix)} of their own weights` : ""}.`;
}

/** What the line may still do about spikes by itself; empty if it halts for each. */
export function spiking(spikes) {
  if (!spikes) return "";
  const left = Object.entries(spikes.left).map(([action, times]) => `${action} ${count(times)}`);
  return `Spikes: of its budget for ${count(spikes.steps)} steps the line has left: ${left.join(", ")}.`;
}

/** How much was computed twice, and what came of it; empty if nothing is. */
function verified(done) {
  if (!done) return "";
  const differed = done.differences ? `, results differed ${several(done.differences, "time")}` : "";
  const convicted = done.convicted.length ? `, convicted: worker ${done.convicted.slice(-16).join(", ")}` : "";
  return `Verified ${several(done.steps, "step")}${differed}${convicted}.`;
}
