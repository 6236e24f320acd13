// A table of the board: a row for each worker, or for each rank.

import { byId, fill, keep, make, mark, say } from "./dom.js";
import { percent } from "./words.js";

/**
 * The table, in its place in the page. A column has a `key`, a `title`, whether it is `numeric`, and
 * `parts`, which makes what a cell of it holds. Without items a paragraph says `nothing()`.
 */
export class Table {
  constructor(columns, nothing) {
    this.columns = columns;
    this.nothing = nothing;
    this.shown = null; // the table, or the paragraph; another table may have taken its place since
  }

  /** Shows a row for each item, and a note; `refresh` writes an item into its row. */
  show(items, keyOf, refresh, note) {
    if (items.length) {
      if (!this.#shows("TABLE")) this.#put(tableOf(this.columns));
      keep(this.shown.tBodies[0], items, keyOf, () => rowOf(this.columns), refresh);
    } else if (!this.#shows("P")) {
      this.#put(make("p", { class: "nothing" }, this.nothing()));
    }
    say(byId("workers-note"), items.length ? note : "");
  }

  #shows(tag) {
    return this.shown?.isConnected && this.shown.tagName === tag;
  }

  #put(element) {
    this.shown = element;
    fill(byId("workers"), element);
  }
}

// The roles are written out because phones show rows as cards, and a changed `display` would take
// the table's meaning away from screen readers.
function tableOf(columns) {
  return make(
    "table",
    { class: "table cards", role: "table", "aria-labelledby": "workers-title" },
    make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, columns.map(({ title, numeric }) =>
      make("th", { role: "columnheader", scope: "col", class: numeric ? "number" : null }, title)))),
    make("tbody", { role: "rowgroup" }),
  );
}

function rowOf(columns) {
  return make("tr", { role: "row" }, columns.map(({ key, title, numeric, parts }, index) =>
    make(index ? "td" : "th", { role: index ? "cell" : "rowheader", scope: index ? null : "row", class: numeric ? `${key} number` : key, data: { title } }, parts())));
}

// ---------------------------------------------------------------- what a cell holds

export const lamp = () => make("span", { class: "lamp", "aria-hidden": "true" });
export const meter = () => [make("span", { class: "meter", "aria-hidden": "true" }), make("span", { class: "figure" })];
export const cut = () => [make("span", { class: "cut" })];
export const twoLines = () => [...cut(), make("span", { class: "cut dim" })];

/** Shows a text, and all of it as the title, for where it is cut. */
export function text(element, value) {
  say(element, value);
  mark(element, "title", value || null);
}

/** Shows a part from 0 to 1 in a cell with a meter; null: it is not known. */
export function measure(cell, part) {
  const [bar, number] = cell.children;
  bar.style.setProperty("--part", part ?? 0);
  say(number, percent(part));
}
