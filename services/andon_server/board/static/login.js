// Login: a token for a session's cookie. The token itself is kept nowhere.

import { post, reason } from "./api.js";
import { byId, fill, make } from "./dom.js";

/** Shows the form; calls `entered` after a token was accepted. `why` is the service's sentence. */
export function showLogin(why, entered) {
  const place = byId("view-login");
  const input = make("input", { id: "token", type: "password", autocomplete: "current-password", required: true, spellcheck: "false", "aria-describedby": "token-note" });
  const failed = make("p", { class: "failed", role: "alert" });
  const go = make("button", { type: "submit", class: "button solid" }, "Log in");
  const form = make("form", { class: "login" }, make("h1", { tabindex: "-1" }, "Log in to the board"),
    make("p", { id: "token-note" }, why || "The run's token lets you look. The operators' token lets you answer halts, too."),
    make("label", { for: "token" }, "Token", input), failed, make("div", { class: "row" }, go));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    go.disabled = true;
    failed.textContent = "";
    try {
      await post("login", { token: input.value.trim() });
      input.value = "";
      entered();
    } catch (error) {
      failed.textContent = reason(error);
      input.select();
      input.focus();
    } finally {
      go.disabled = false;
    }
  });
  fill(place, form);
  input.focus();
}
