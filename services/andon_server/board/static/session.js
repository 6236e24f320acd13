// A session of ranks: its light, the lights of its ranks, its figures, and why it ended.

import { byId, fill, make } from "./dom.js";
import { NONE, bytes, count, duration, listed, percent, plain, several } from "./words.js";

const QUIET_S = 5; // ranks report every second
const LONG_S = 5; // a call that waits for others for so long is worth a warning

/** The light of a session: {light, word, why}. Its word is true only while it is heard, or once it is over. */
export function sessionLight({ session, step }) {
  const { phase, last } = session;
  if (phase === "live") return { light: "green", word: "Running", why: waitingSentence(session) || `${several(goingOn(session), "rank")} run together.` };
  if (phase === "over") {
    if (!last) return { light: "blue", word: "Over", why: `All ranks left in order, after ${several(step, "step")}.` };
    return { light: "red", word: "Over", why: sentence(last.message) };
  }
  const waits = `It waits for ${session.waiting_for || "ranks to attend"}.`;
  return { light: "amber", word: "Forming", why: last ? `${waits} The session before ended: ${sentence(last.message)}` : waits };
}

/** The light of one rank, and its word. */
export function rankLight(rank, { phase, last }) {
  if (phase === "over") {
    if (last && rank.rank === last.culprit) return ["red", "at fault"];
    return last ? ["off", "over"] : ["blue", "done"];
  }
  if (rank.state === "left") return ["off", "left"];
  if (rank.silent_s > QUIET_S) return ["amber", `silent for ${duration(rank.silent_s)}`];
  if (phase === "forming") return ["amber", "waits for the others"];
  const { pending } = rank;
  if (pending?.missing_count && pending.open_s > LONG_S) return ["amber", `waits for ${missingOf(pending)}`];
  return ["green", rank.state];
}

/** Whom a call waits for: `rank 2`, `ranks 1, 2 and 5 more`. */
export function missingOf({ missing, missing_count: whole }) {
  const more = whole - missing.length;
  return `${whole === 1 ? "rank" : "ranks"} ${listed(more ? [...missing, `${count(more)} more`] : missing)}`;
}

/** The ranks that have not left. */
export function goingOn({ ranks }) {
  return ranks.filter((rank) => rank.state !== "left").length;
}

/** Cells of figures: [name, value, unit, note]. */
export function sessionFigures({ session }) {
  const { ranks } = session;
  const whole = (name) => ranks.reduce((sum, rank) => sum + rank[name], 0);
  const most = ranks.reduce((found, rank) => (found && found.exchange_ratio >= rank.exchange_ratio ? found : rank), null);
  const live = session.phase === "live";
  const here = session.phase === "over" ? ranks.length : goingOn(session);
  const overflows = Math.max(0, ...ranks.map((rank) => rank.overflows));
  return [
    ["Ranks", session.world_size ? count(here) : NONE, session.world_size ? `of ${count(session.world_size)}` : "", ""],
    ["Session", session.formed ? count(session.formed) : NONE, "", live ? `for ${duration(session.age_s)}` : ""],
    ["Exchange", live && most ? percent(most.exchange_ratio) : NONE, "", live && most ? `of its time, rank ${most.rank}` : ""],
    ["Input", ...split(ranks.length ? bytes(whole("bytes")) : NONE), "of all calls"],
    ["Calls", ranks.length ? count(whole("calls")) : NONE, "", overflows ? `${several(overflows, "step")} overflowed` : ""],
  ];
}

function split(text) {
  const [value, unit = ""] = text.split("\u202f");
  return [value, unit];
}

/** Who waits for whom, if that takes long. */
function waitingSentence({ ranks }) {
  const waits = ranks.filter((rank) => rank.pending?.missing_count && rank.pending.open_s > LONG_S);
  if (!waits.length) return "";
  const [first] = waits.sort((a, b) => b.pending.open_s - a.pending.open_s);
  return `Rank ${first.rank} has waited for ${missingOf(first.pending)} for ${duration(first.pending.open_s)}, in ${first.pending.text}.`;
}

let shown = "";

/** Shows why a session ended, where a line would show a halt; nothing while there is none. */
export function showEnd(session) {
  const place = byId("evidence");
  const last = session?.phase === "over" ? session.last : null;
  const key = last ? JSON.stringify(last) : "";
  if (key === shown) return;
  shown = key;
  place.hidden = !last;
  fill(place, last ? facts(last) : null);
}

function facts(last) {
  const element = last.element.length ? `[${last.element.join(", ")}]` : "";
  const rows = [
    ["Why", plain(last.end)],
    ["Rank", last.culprit === null ? "" : String(last.culprit)],
    ["Host", last.host],
    ["Reported by", last.reported_by === null ? "" : `rank ${last.reported_by}`],
    ["Value", last.value],
    ["Parameter", last.parameter ? last.parameter + element : ""],
    ["Call", last.call],
    ["Its call", last.other_call],
  ].filter(([, value]) => value);
  return make("dl", { class: "facts" }, rows.map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", { title: value }, value))));
}

function sentence(text) {
  const whole = text ? text[0].toUpperCase() + text.slice(1) : "";
  return /[.!?]$/.test(whole) || !whole ? whole : `${whole}.`;
}
