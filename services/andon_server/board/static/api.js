// The board's JSON: reads, and the few requests that change something.

const ROOT = "board/api/";

/** The service refused a request; `message` is its own sentence, with the remedy. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Reads JSON. Throws Refused, or TypeError if nobody answers. */
export async function read(path) {
  return answered(await fetch(ROOT + path, { headers: { Accept: "application/json" }, cache: "no-store" }));
}

/** Asks the service to do something. Throws as `read`. */
export async function post(path, body) {
  return answered(
    await fetch(ROOT + path, {
      method: "POST",
      // The header can't be sent by another site's page without the service's consent.
      headers: { "Content-Type": "application/json", "X-Andon-Board": "1" },
      body: JSON.stringify(body),
    }),
  );
}

/** Opens the stream of events. Throws as `read`. */
export async function open(path, signal) {
  const response = await fetch(ROOT + path, {
    headers: { Accept: "text/event-stream" },
    cache: "no-store",
    signal,
  });
  if (!response.ok) await answered(response);
  return response.body;
}

/** What to tell a person about an error of the above. */
export function reason(error) {
  return error instanceof Refused ? error.message : "The service does not answer. Is the run still there?";
}

async function answered(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    if (response.ok) throw new Refused(response.status, "The service's answer is not JSON.");
  }
  if (!response.ok) {
    throw new Refused(response.status, body?.error ?? `The service answered ${response.status}.`);
  }
  return body;
}
