// Words: numbers, times and states as people read them. The terminal writes them the same way.

export const NONE = "–";
const THIN = "\u202f"; // narrow no-break space: groups digits and separates units

/** A count: `1 204`. */
export function count(number) {
  return String(Math.round(number)).replace(/\B(?=(\d{3})+(?!\d))/g, THIN);
}

/** A number with about three digits: `0.0312`, `2.413`, `87.1`, `1 204`. */
export function figure(number) {
  if (number === null || number === undefined || !Number.isFinite(number)) return NONE;
  const size = Math.abs(number);
  if (size === 0) return "0";
  if (size < 0.001 || size >= 1e7) return number.toExponential(2).replace("e+", "e");
  if (size < 10) return number.toFixed(size < 0.1 ? 4 : 3);
  if (size < 100) return number.toFixed(1);
  return (number < 0 ? "−" : "") + count(size);
}

/** A rate: `3.4`, `87`, `1 204`. */
export function rate(number) {
  if (number === null || number === undefined || !Number.isFinite(number)) return NONE;
  return number < 9.95 ? number.toFixed(1) : count(number);
}

/** A short time as number and unit: `84 ms`, `1.24 s`. */
export function span(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  if (seconds < 0.00995) return `${(seconds * 1000).toFixed(1)}${THIN}ms`;
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(0)}${THIN}ms`;
  return seconds < 100 ? `${seconds.toFixed(seconds < 10 ? 2 : 1)}${THIN}s` : duration(seconds);
}

/** The end of a path: `…/runs/7f3a/checkpoints`. */
export function tail(path) {
  const parts = path.split("/");
  return parts.length > 4 ? `…/${parts.slice(-3).join("/")}` : path;
}

/** A number on an axis, without needless zeros: `0.5`, `3`, `1e-4`. */
export function shortly(number) {
  const size = Math.abs(number);
  if (size >= 1000 && size < 1e7) return count(number);
  if (size && (size < 0.001 || size >= 1e7)) return number.toExponential(1).replace("e+", "e").replace(".0e", "e");
  return String(Number(number.toPrecision(3)));
}

/** A time on an axis: `0`, `50 ms`, `1.5 s`. */
export function shortSpan(seconds) {
  if (seconds === 0) return "0";
  return seconds < 1 ? `${shortly(seconds * 1000)}${THIN}ms` : `${shortly(seconds)}${THIN}s`;
}

/** A time for people: `7s`, `1m12s`, `2h05m`, `3d04h`. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole}s`;
  const two = (number) => String(number).padStart(2, "0");
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes}m${two(whole % 60)}s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours}h${two(minutes % 60)}m`;
  return `${Math.floor(hours / 24)}d${two(hours % 24)}h`;
}

/** The time since something, exact while it is short: `2.4 s`, `1m12s`. */
export function age(seconds) {
  return seconds < 9.95 ? `${seconds.toFixed(1)}${THIN}s` : duration(seconds);
}

/** A part from 0 to 1: `23 %`. */
export function percent(part) {
  if (part === null || part === undefined || !Number.isFinite(part)) return NONE;
  return `${Math.round(part * 100)}${THIN}%`;
}

/** Memory: `22.0 GiB`. */
export function memory(bytes) {
  return `${(bytes / 2 ** 30).toFixed(1)}${THIN}GiB`;
}

/** A number of bytes, as the terminal writes it: `888.8 kB`. */
export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let place = 0;
  for (; number >= 1000 && place < units.length - 1; place += 1) number /= 1000;
  return `${place ? number.toFixed(1) : number.toFixed(0)}${THIN}${units[place]}`;
}

/** `1 worker`, `2 workers`. */
export function several(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** The time of day, with the date if it was not today. */
export function clock(unixSeconds) {
  const when = new Date(unixSeconds * 1000);
  const time = when.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
  const day = when.toDateString() === new Date().toDateString();
  return day ? time : `${when.toLocaleDateString([], { month: "short", day: "numeric" })} ${time}`;
}

/** A date and time for a title and a table: `2026-11-22 21:04`. */
export function date(unixSeconds) {
  const when = new Date(unixSeconds * 1000);
  const two = (number) => String(number).padStart(2, "0");
  return `${when.getFullYear()}-${two(when.getMonth() + 1)}-${two(when.getDate())} ${two(when.getHours())}:${two(when.getMinutes())}`;
}

/** `0, 1 and 3`. */
export function listed(names) {
  if (names.length < 2) return names.join("");
  return `${names.slice(0, -1).join(", ")} and ${names[names.length - 1]}`;
}

/** A name of the protocol as words: `non_finite_gradient` → `non finite gradient`. */
export function plain(name) {
  return String(name).toLowerCase().replaceAll("_", " ");
}

/** The light that a state of the line puts on. */
export const LIGHTS = {
  RUNNING: "green",
  FORMING: "amber",
  SYNCING: "amber",
  DRAINING: "amber",
  HALTED: "red",
  COMPLETE: "blue",
};

/** The word for each state. */
export const STATES = {
  RUNNING: "Running",
  FORMING: "Forming",
  SYNCING: "Syncing",
  DRAINING: "Draining",
  HALTED: "Halted",
  COMPLETE: "Complete",
};

/** A run's state in the history: one of the above, or what a journal alone can say. */
export function stateWord(state) {
  return STATES[state] ?? (state ? plain(state)[0].toUpperCase() + plain(state).slice(1) : "Unknown");
}

export function lightOf(state) {
  return LIGHTS[state] ?? LIGHTS[String(state).toUpperCase()] ?? "off";
}
