// A table of the board: a row for each worker, or for each rank.

import { make, mark, say } from "./dom.js";

/** The table without rows. Columns are pairs of a key and a title; `numeric` has keys. */
// The roles are written out because phones show rows as cards, and a changed `display` would take
// the table's meaning away from screen readers.
export function tableOf(columns, numeric) {
  return make(
    "table",
    { class: "table cards", role: "table", "aria-labelledby": "workers-title" },
    make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, columns.map(([key, title]) =>
      make("th", { role: "columnheader", scope: "col", class: numeric.has(key) ? "number" : null }, title)))),
    make("tbody", { role: "rowgroup" }),
  );
}

/** A row; `partsOf` says what the cell of a key holds. */
export function rowOf(columns, numeric, partsOf) {
  return make("tr", { role: "row" }, columns.map(([key, title], index) => {
    const cell = make(index ? "td" : "th", { role: index ? "cell" : "rowheader", scope: index ? null : "row", class: numeric.has(key) ? `${key} number` : key, data: { title } });
    cell.append(...partsOf(key));
    return cell;
  }));
}

export const lamp = () => make("span", { class: "lamp", "aria-hidden": "true" });
export const meter = () => [make("span", { class: "meter", "aria-hidden": "true" }), make("span", { class: "figure" })];
export const cut = () => make("span", { class: "cut" });
export const twoLines = () => [cut(), make("span", { class: "cut dim" })];

/** Shows a text, and all of it as the title, for where it is cut. */
export function text(element, value) {
  say(element, value);
  mark(element, "title", value || null);
}
