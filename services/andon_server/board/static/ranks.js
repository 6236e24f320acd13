// The ranks of a session: a row for each, with what it did and the call that it is in.

import { byId, fill, keep, make, mark, say } from "./dom.js";
import { goingOn, missingOf, rankLight } from "./session.js";
import { cut, lamp, meter, rowOf, tableOf, text, twoLines } from "./table.js";
import { NONE, bytes, count, duration, percent, several } from "./words.js";

const COLUMNS = [
  ["worker", "Rank"],
  ["place", "Host and device"],
  ["doing", "State"],
  ["steps", "Steps"],
  ["waits", "Exchange"],
  ["given", "Input"],
  ["pending", "Pending call"],
];
const NUMERIC = new Set(["steps", "given"]);

let body = null;

/** Shows the table; without ranks, what a script needs. */
export function showRanks(state, heard) {
  const place = byId("workers");
  const { session } = state;
  if (!session.ranks.length) {
    body = null;
    if (place.dataset.empty !== "ranks") {
      fill(place, make("p", { class: "nothing" }, "No rank attends. A script does with ", make("code", {}, 'init_process_group("andon")'), "."));
      place.dataset.empty = "ranks";
    }
    say(byId("workers-note"), "");
    return;
  }
  if (!body?.isConnected) {
    const table = tableOf(COLUMNS, NUMERIC);
    [body] = table.tBodies;
    fill(place, table);
    delete place.dataset.empty;
  }
  keep(body, session.ranks, (rank) => rank.rank, row, (element, rank) => refresh(element, rank, session, heard));
  say(byId("workers-note"), noteOf(session, heard));
}

function noteOf(session, heard) {
  if (session.phase === "over") return "as the session ended";
  return heard ? `${count(goingOn(session))} of ${several(session.world_size, "rank")} are here` : "as last heard";
}

function row() {
  return rowOf(COLUMNS, NUMERIC, (key) => {
    if (key === "worker") return [lamp(), make("span")];
    if (key === "waits") return meter();
    return key === "place" || key === "pending" ? twoLines() : [cut()];
  });
}

function refresh(element, rank, session, heard) {
  const [light, said] = heard || session.phase === "over" ? rankLight(rank, session) : ["off", "not heard"];
  const [name, place, doing, steps, waits, given, pending] = element.children;
  mark(element, "data-light", light);
  say(name.children[1], rank.rank);
  text(place.children[0], rank.host || NONE);
  text(place.children[1], rank.device || rank.backend);
  text(doing.firstElementChild, said);
  text(steps.firstElementChild, rank.overflows ? `${count(rank.steps)} (${count(rank.overflows)} overflowed)` : count(rank.steps));
  const [bar, number] = waits.children;
  bar.style.setProperty("--part", rank.exchange_ratio);
  say(number, percent(rank.exchange_ratio));
  mark(waits, "title", `${duration(rank.exchange_s)} in ${several(rank.calls, "call")}`);
  say(given.firstElementChild, bytes(rank.bytes));
  text(pending.children[0], rank.pending?.text ?? NONE);
  text(pending.children[1], rank.pending ? callNote(rank.pending) : "");
}

/** For how long a call has been open, and for whom it waits. */
function callNote(pending) {
  const open = `open for ${pending.open_s < 9.95 ? `${pending.open_s.toFixed(1)}\u202fs` : duration(pending.open_s)}`;
  return pending.missing_count ? `${open}, waits for ${missingOf(pending)}` : open;
}
