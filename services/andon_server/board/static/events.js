// What happened: joins, losses, attempts, halts, answers and checkpoints, newest first.

import { fill, keep, make, mark, say } from "./dom.js";
import { clock, count, date, plain } from "./words.js";

const KINDS = {
  started: ["blue", "Started"],
  joined: ["green", "Joined"],
  caught_up: ["green", "Caught up"],
  notice: ["amber", "Notice"],
  left: ["off", "Left"],
  lost: ["amber", "Lost"],
  dropped: ["amber", "Dropped"],
  attempt: ["amber", "Tried again"],
  halted: ["red", "Halted"],
  answered: ["green", "Answered"],
  arithmetic: ["amber", "Other arithmetic"],
  convicted: ["red", "Convicted"],
  spike: ["amber", "Spike"],
  slow: ["amber", "Slow"],
  eased: ["amber", "Dealt less"],
  evicted: ["amber", "Slow"],
  overflow: ["amber", "Overflow"],
  mean: ["off", "Mean"],
  checkpoint: ["off", "Checkpoint"],
  checkpoint_missed: ["amber", "No checkpoint"],
  went_back: ["amber", "Went back"],
  complete: ["blue", "Complete"],
  session: ["green", "Session"],
  session_over: ["amber", "Session over"],
};
const MARKED = { halted: "--red", convicted: "--red", spike: "--amber", lost: "--amber", dropped: "--amber", went_back: "--amber", session_over: "--amber" };
const OF_SESSIONS = ["session", "session_over"];
const MOST = 200;

/** A run's events by id, so that one that comes twice is kept once. */
export class Events {
  clear() {
    this.known = new Map();
  }

  constructor() {
    this.clear();
  }

  add(events) {
    for (const event of events) this.known.set(String(event.id), event);
  }

  get list() {
    return [...this.known.values()].sort((a, b) => b.at_unix_s - a.at_unix_s || Number(b.id) - Number(a.id));
  }

  /** What events call those who train: ranks if the run had a session. */
  get who() {
    return [...this.known.values()].some(({ kind }) => OF_SESSIONS.includes(kind)) ? "rank" : "worker";
  }

  /** Steps that the charts mark. */
  get marks() {
    return this.list.flatMap(({ kind, step }) => (MARKED[kind] ? [{ step, colour: MARKED[kind] }] : []));
  }
}

/** Shows events in an element. */
export function showEvents(place, events) {
  const all = events.list;
  if (!all.length) {
    fill(place, make("p", { class: "nothing" }, "Nothing yet. Joins, losses, halts, answers and checkpoints will be listed here."));
    return;
  }
  let list = place.querySelector("ol");
  if (!list) {
    list = make("ol", { class: "happenings", reversed: true });
    fill(place, list, make("p", { class: "more" }));
  }
  const { who } = events;
  keep(list, all.slice(0, MOST), (event) => `${who} ${event.id}`, (event) => item(event, who), () => {});
  const more = place.querySelector(".more");
  mark(more, "hidden", all.length <= MOST);
  say(more, `${count(all.length - MOST)} earlier ones are in the journal: andon history.`);
}

function item(event, who) {
  const [light, word] = KINDS[event.kind] ?? ["off", plain(event.kind)];
  // A checkpoint's text is its folder, and its writer matters less than its step.
  const folder = event.kind === "checkpoint" && event.text;
  const about = folder ? `worker ${event.worker}: ${event.text.split("/").slice(-2).join("/")}` : event.text;
  const named = !folder && event.worker !== null && event.worker !== undefined;
  return make("li", { class: "happening", data: { light, kind: event.kind } },
    make("span", { class: "bead", "aria-hidden": "true" }),
    make("p", { class: "head" }, make("span", {}, make("strong", {}, word), named ? ` ${who} ${event.worker}` : "",
      make("span", { class: "dim" }, event.step ? ` · step\u00a0${count(event.step)}` : "")),
      make("time", { class: "dim", datetime: new Date(event.at_unix_s * 1000).toISOString(), title: date(event.at_unix_s) }, clock(event.at_unix_s))),
    about ? make("p", { class: folder ? "about cut" : "about", title: event.text }, about) : null);
}
