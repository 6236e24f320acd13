// A question in the middle of the page, before something that can't be undone.

import { byId, fill, make } from "./dom.js";

/**
 * Asks, and returns null (no) or {chosen, written}. The focus begins on "Cancel" unless there is
 * something to write, and goes back to where it was.
 *
 * @param {{title: string, effect: string, yes: string, danger?: boolean,
 *   choose?: {label: string, values: number[]}, write?: {label: string, hint: string}}} question
 */
export function ask({ title, effect, yes, danger, choose, write }) {
  const dialog = byId("ask");
  const select = choose && make("select", { id: "ask-choice" }, choose.values.map((each) => make("option", { value: each }, each)));
  const input = write && make("input", { id: "ask-text", type: "text", maxlength: "200", placeholder: write.hint, autocomplete: "off" });
  const cancel = make("button", { type: "button", class: "button" }, "Cancel");
  const go = make("button", { type: "submit", class: danger ? "button danger solid" : "button solid" }, yes);
  const form = make("form", { method: "dialog" },
    make("h2", { id: "ask-title" }, title), make("p", { id: "ask-effect" }, effect),
    select && make("label", { for: "ask-choice" }, choose.label, select),
    input && make("label", { for: "ask-text" }, write.label, input),
    make("div", { class: "row" }, cancel, go));
  fill(dialog, form);
  return new Promise((answer) => {
    let agreed = false;
    cancel.addEventListener("click", () => dialog.close());
    form.addEventListener("submit", (event) => {
      event.preventDefault(); // the page may not submit forms at all
      agreed = true;
      dialog.close();
    });
    // The event comes after the closing: the next question may be open by then, and is not closed.
    const closed = () => {
      if (dialog.open) return;
      dialog.removeEventListener("close", closed);
      answer(agreed ? { chosen: select?.value, written: input?.value.trim() ?? "" } : null);
    };
    dialog.addEventListener("close", closed);
    dialog.showModal();
    (input ?? select ?? cancel).focus();
  });
}
