// The live feed: server-sent events, read by fetch. EventSource would hide two things that the board
// must know: that a quiet connection is dead (comments are its heartbeat), and why one was refused.

import { Refused, open } from "./api.js";

const SILENCE_MS = 25_000; // the service sends at least a comment every 10 s
const WAITS_MS = [500, 1000, 2000, 4000, 8000];

/**
 * Follows the line for ever. Calls `onMessage(event, data)`, and `onSignal` with {kind: "connecting"},
 * {kind: "live"}, {kind: "lost", retryAt, since} or {kind: "refused", error}.
 */
export class LiveFeed {
  constructor(onMessage, onSignal) {
    this.onMessage = onMessage;
    this.onSignal = onSignal;
    this.wake = () => {};
    this.failures = 0;
    this.lostAt = 0;
  }

  async follow() {
    addEventListener("online", () => this.wake());
    document.addEventListener("visibilitychange", () => document.hidden || this.wake());
    for (;;) {
      let refusal = null;
      try {
        await this.#listen();
      } catch (error) {
        // Anything else may be over in a moment, such as the answer of another service on that port.
        if (error instanceof Refused && [401, 403].includes(error.status)) refusal = error;
      }
      if (this.anew) {
        this.anew = false;
        continue;
      }
      this.lostAt ||= Date.now();
      if (refusal) {
        this.onSignal({ kind: "refused", error: refusal });
        await this.#pause(null); // until somebody logs in
        this.anew = false;
      } else {
        const wait = WAITS_MS[Math.min(this.failures, WAITS_MS.length - 1)];
        this.failures += 1;
        this.onSignal({ kind: "lost", retryAt: Date.now() + wait, since: this.lostAt, failures: this.failures });
        await this.#pause(wait);
      }
    }
  }

  /** Connects anew, at once: somebody logged in, and may see and do more. */
  restart() {
    this.anew = true;
    this.abort?.abort();
    this.wake();
  }

  #pause(milliseconds) {
    return new Promise((resume) => {
      const timer = milliseconds === null ? null : setTimeout(resume, milliseconds);
      this.wake = () => {
        clearTimeout(timer);
        resume();
      };
    });
  }

  async #listen() {
    const abort = (this.abort = new AbortController());
    let watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
    try {
      const reader = (await open("live", abort.signal)).pipeThrough(new TextDecoderStream()).getReader();
      const lines = new Lines();
      for (;;) {
        const { value, done } = await reader.read();
        clearTimeout(watchdog);
        if (done) return;
        watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
        for (const [event, data] of lines.read(value)) this.#deliver(event, data);
      }
    } finally {
      clearTimeout(watchdog);
      abort.abort();
    }
  }

  #deliver(event, data) {
    // The first message, not the open connection, proves that a line is there.
    if (this.failures || this.lostAt || !this.heard) {
      this.failures = this.lostAt = 0;
      this.heard = true;
      this.onSignal({ kind: "live" });
    }
    this.onMessage(event, JSON.parse(data));
  }
}

/** Splits a stream of text into messages, as the standard of server-sent events says. */
export class Lines {
  rest = "";
  event = "";
  data = [];

  /** Returns the messages that `text` completes, as [event, data]. */
  read(text) {
    const messages = [];
    const whole = this.rest + text;
    // A last \r may be half of \r\n.
    const half = whole.endsWith("\r") ? "\r" : "";
    const lines = whole.slice(0, whole.length - half.length).split(/\r\n|\n|\r/);
    this.rest = lines.pop() + half;
    for (const line of lines) {
      if (line === "") {
        if (this.data.length) messages.push([this.event || "message", this.data.join("\n")]);
        this.event = "";
        this.data = [];
      } else if (!line.startsWith(":")) {
        const [, field, value] = /^([^:]*)(?:: ?(.*))?$/s.exec(line);
        if (field === "event") this.event = value ?? "";
        else if (field === "data") this.data.push(value ?? "");
      }
    }
    return messages;
  }
}
