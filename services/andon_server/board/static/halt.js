// A halt: its evidence in words, and the answers as buttons that say what each will do.

import { post, reason } from "./api.js";
import { ask } from "./ask.js";
import { byId, fill, make } from "./dom.js";
import { clock, count, figure, plain } from "./words.js";

const TITLES = { retry: "Try again", skip: "Skip", drop: "Drop" };
let shown = "";

/** Shows the halt, or nothing. Builds anew only for another halt, so that focus stays on a button. */
export function showHalt(state, heard, login) {
  const place = byId("evidence");
  const halt = state?.state === "HALTED" ? state.halt : null;
  const key = halt ? `${halt.id} ${state.may_operate} ${heard}` : "";
  if (key === shown) return;
  shown = key;
  place.hidden = !halt;
  if (!halt) {
    fill(place);
    return;
  }
  fill(place, facts(halt), heard ? answers(halt, state, login) : null);
}

function facts(halt) {
  const element = halt.element?.length ? `[${halt.element.join(", ")}]` : "";
  const rows = [
    ["Reason", plain(halt.reason)],
    ["Step", count(halt.step)],
    ["Worker", workerOf(halt)],
    ["Reported by", reporterOf(halt)],
    ["Value", valueOf(halt)],
    ["Parameter", halt.parameter ? halt.parameter + element : ""],
    ["Since", clock(halt.at_unix_s)],
  ].filter(([, value]) => value !== "");
  return make("dl", { class: "facts" }, [...rows, ["More", helpOf(halt), halt.help]].map(([name, value, title = value]) =>
    make("div", {}, make("dt", {}, name), make("dd", { title }, value))));
}

/** The page that says what to do: a link if the service knows where the documentation is. */
function helpOf({ help, help_url: url }) {
  return url ? make("a", { href: url, target: "_blank", rel: "noreferrer" }, help) : help;
}

function workerOf({ worker, reported_by }) {
  if (worker === null) return "";
  return reported_by === null || reported_by === worker ? String(worker) : `${worker}, as worker ${reported_by} says`;
}

/** Who says it, if no worker is at fault: else nobody could tell it from what the service saw. */
function reporterOf({ worker, reported_by }) {
  return worker === null && reported_by !== null ? `worker ${reported_by}` : "";
}

function valueOf({ value }) {
  if (value === null || value === undefined) return "";
  return typeof value === "number" ? figure(value) : value;
}

function answers(halt, state, login) {
  const failed = make("p", { class: "failed", role: "alert" });
  if (!state.may_operate) {
    const commands = halt.answers.map((each) => make("li", {}, make("code", {}, each.command), ` ${each.effect}`));
    return make("div", { class: "answers" },
      make("h2", {}, "An operator answers"),
      state.needs_login ? make("button", { type: "button", class: "button", on: { click: login } }, "Log in to answer") : null,
      make("ul", { class: "commands" }, commands));
  }
  const buttons = halt.answers.map((each) => button(halt, each, state, failed));
  return make("div", { class: "answers" }, make("h2", { id: "answers-title" }, "What shall the line do?"),
    make("div", { class: "options", role: "group", "aria-labelledby": "answers-title" }, buttons), failed);
}

function button(halt, each, state, failed) {
  const element = make("button", { type: "button", class: `option ${each.answer}`, data: { answer: each.answer } },
    make("strong", {}, each.label || TITLES[each.answer]), make("span", {}, sentence(each.effect)), make("code", {}, each.command));
  element.addEventListener("click", () => {
    if (each.answer === "retry") send(halt, each, each.worker, element, failed);
    else confirm(halt, each, state, element, failed);
  });
  return element;
}

async function confirm(halt, each, state, element, failed) {
  const workers = state.workers.filter((worker) => worker.live).map((worker) => worker.worker);
  const unknown = each.answer === "drop" && each.worker === null;
  const answer = await ask({
    title: `${each.label || TITLES[each.answer]}?`,
    effect: `${sentence(each.effect)} This can't be undone.`,
    choose: unknown ? { label: "Worker", values: workers } : null,
    yes: each.answer === "skip" ? "Skip" : "Drop",
    danger: true,
  });
  if (answer) await send(halt, each, unknown ? Number(answer.chosen) : each.worker, element, failed);
}

async function send(halt, each, worker, element, failed) {
  const buttons = element.parentElement.querySelectorAll("button");
  buttons.forEach((one) => (one.disabled = true));
  failed.textContent = "";
  try {
    await post("answer", { halt_id: halt.id, answer: each.answer, worker });
    element.classList.add("sent");
  } catch (error) {
    failed.textContent = reason(error);
    buttons.forEach((one) => (one.disabled = false));
    element.focus();
  }
}

function sentence(text) {
  const whole = text ? text[0].toUpperCase() + text.slice(1) : "";
  return /[.!?]$/.test(whole) || !whole ? whole : `${whole}.`;
}
