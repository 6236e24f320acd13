// The ranks of a session: a row for each, with what it did and the call that it is in.

import { make, mark, say } from "./dom.js";
import { goingOn, missingOf, rankLight } from "./session.js";
import { Table, cut, lamp, measure, meter, text, twoLines } from "./table.js";
import { NONE, age, bytes, count, duration, several } from "./words.js";

const table = new Table(
  [
    { key: "worker", title: "Rank", parts: () => [lamp(), make("span")] },
    { key: "place", title: "Host and device", parts: twoLines },
    { key: "doing", title: "State", parts: cut },
    { key: "steps", title: "Steps", numeric: true, parts: cut },
    { key: "waits", title: "Exchange", parts: meter },
    { key: "given", title: "Input", numeric: true, parts: cut },
    { key: "pending", title: "Pending call", parts: twoLines },
  ],
  () => ["No rank attends. A script does with ", make("code", {}, 'init_process_group("andon")'), "."],
);

/** Shows the table; without ranks, what a script needs. */
export function showRanks({ session }, heard) {
  table.show(session.ranks, (rank) => rank.rank, (element, rank) => refresh(element, rank, session, heard), noteOf(session, heard));
}

function noteOf(session, heard) {
  if (session.phase === "over") return "as the session ended";
  return heard ? `${count(goingOn(session))} of ${several(session.world_size, "rank")} are here` : "as last heard";
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
  measure(waits, rank.exchange_ratio);
  mark(waits, "title", `${duration(rank.exchange_s)} in ${several(rank.calls, "call")}`);
  say(given.firstElementChild, bytes(rank.bytes));
  text(pending.children[0], rank.pending?.text ?? NONE);
  text(pending.children[1], rank.pending ? callNote(rank.pending) : "");
}

/** For how long a call has been open, and for whom it waits. */
function callNote(pending) {
  const open = `open for ${age(pending.open_s)}`;
  return pending.missing_count ? `${open}, waits for ${missingOf(pending)}` : open;
}
