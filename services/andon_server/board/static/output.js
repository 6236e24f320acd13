// What a worker printed last, asked for again and again while somebody looks.

import { read, reason } from "./api.js";
import { byId, fill, make, say } from "./dom.js";
import { date, duration, memory } from "./words.js";

const EVERY_MS = 2000;
const CRASHES = 5; // so many of a worker are told
let worker = null; // whose output is shown
let timer = 0;

/** Shows the output of a worker below the table; of the one that is shown already, nothing any more. */
export function showOutput(number) {
  clearTimeout(timer);
  worker = worker === number ? null : number;
  const place = byId("output");
  place.hidden = worker === null;
  if (worker === null) return;
  fill(place,
    make("div", { class: "heading" }, make("h3", { id: "output-title" }, `The last lines of worker ${number}`),
      make("button", { type: "button", class: "small", on: { click: () => showOutput(number) } }, "close")),
    make("ul", { class: "crashes", "aria-label": `How worker ${number} ended` }),
    make("pre", { tabindex: "0", role: "region", "aria-labelledby": "output-title" }, " "));
  follow(number, place.lastElementChild);
}

async function follow(number, text) {
  try {
    const { lines, crashes } = await read(`workers/${number}/output`);
    const told = crashes.slice(-CRASHES).map((crash) => make("li", {}, inWords(crash)));
    if (worker === number) fill(text.previousElementSibling, ...told);
    say(text, lines.join("\n") || "It has printed nothing yet.");
  } catch (error) {
    say(text, reason(error));
  }
  if (worker === number) timer = setTimeout(() => follow(number, text), EVERY_MS);
}

function inWords(crash) {
  const held = crash.memory_bytes ? `, it held ${memory(crash.memory_bytes)}` : "";
  const kind = crash.kind.replaceAll("_", " ");
  return `${date(crash.at_unix_s)}, ${kind}, step ${crash.step}, after ${duration(crash.ran_s)}${held}: ${crash.text}`;
}
