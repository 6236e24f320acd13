// A run's curves: what the journal has, and the points that arrive while it runs.

const COLUMNS = ["step", "loss", "loss_min", "loss_max", "step_seconds", "samples_per_second", "at_unix_s", "gradient_norm"];
const MOST_LIVE = 2000; // beyond so many live points the curves are fetched again, reduced

/** The columns of one run, and its logged scalars by name: {step: [], value: []}. */
export class Curves {
  constructor() {
    this.clear();
  }

  clear() {
    this.steps = Object.fromEntries(COLUMNS.map((name) => [name, []]));
    this.recent = []; // the last steps in full, for the table
    this.scalars = new Map();
    this.workers = new Map(); // name -> step -> worker -> value, of live points
    this.live = 0;
  }

  /** Whether so many points were added that it should be loaded anew. */
  get heavy() {
    return this.live > MOST_LIVE;
  }

  get last() {
    return this.steps.step.at(-1) ?? 0;
  }

  /** Takes the journal's curves; live points that are newer stay. */
  load(fetched) {
    const newer = this.recent.filter((point) => point[0] > (fetched.steps.step.at(-1) ?? 0));
    for (const name of COLUMNS) this.steps[name] = [...(fetched.steps[name] ?? [])];
    this.live = 0;
    for (const point of newer) this.#append(point);
    const before = this.scalars;
    this.scalars = new Map();
    for (const [name, { step, value }] of Object.entries(fetched.scalars ?? {})) {
      this.scalars.set(name, { step: [...step], value: [...value] });
    }
    for (const [name, { step, value }] of before) {
      const known = this.#scalar(name);
      const last = known.step.at(-1) ?? -1;
      step.forEach((each, index) => {
        if (each > last) {
          known.step.push(each);
          known.value.push(value[index]);
        }
      });
    }
  }

  /** Takes live points; those of steps that are known are dropped. */
  add({ steps = [], scalars = [] }) {
    for (const point of steps) {
      if (point[0] <= this.last) continue;
      this.#append(point);
      this.recent.push(point);
      if (this.recent.length > 400) this.recent.splice(0, 200);
    }
    for (const [name, step, worker, value] of scalars) this.#log(name, step, worker, value);
  }

  #append([step, loss, seconds, samples, , norm, at]) {
    const row = [step, loss, loss, loss, seconds, seconds > 0 ? samples / seconds : null, at, norm];
    COLUMNS.forEach((name, index) => this.steps[name].push(row[index]));
    this.live += 1;
  }

  /** A scalar's curve is the mean over the workers that logged it at a step. */
  #log(name, step, worker, value) {
    const known = this.#scalar(name);
    const last = known.step.at(-1) ?? -1;
    const steps = this.workers.get(name) ?? this.workers.set(name, new Map()).get(name);
    // A step whose mean came from the journal has all its workers already.
    if (step < last || (step === last && !steps.has(step))) return;
    const workers = steps.get(step) ?? steps.set(step, new Map()).get(step);
    workers.set(worker, value);
    const values = [...workers.values()].filter((each) => each !== null);
    const mean = values.length ? values.reduce((sum, each) => sum + each, 0) / values.length : null;
    if (step > last) {
      known.step.push(step);
      known.value.push(mean);
      if (steps.size > 8) steps.delete(steps.keys().next().value);
    } else {
      known.value[known.value.length - 1] = mean;
    }
  }

  #scalar(name) {
    return this.scalars.get(name) ?? this.scalars.set(name, { step: [], value: [] }).get(name);
  }
}

/** Puts series with their own steps on one axis: [steps, values, values, ...], null where one has none. */
export function joined(series) {
  const steps = [...new Set(series.flatMap(({ step }) => step))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const columns = series.map(({ step, value }) => {
    const column = new Array(steps.length).fill(null);
    step.forEach((each, index) => (column[place.get(each)] = value[index]));
    return column;
  });
  return [steps, ...columns];
}

/**
 * The exponential moving average of a column, corrected for its beginning: the first mean is the first
 * value, and not a part of it. Gaps stay gaps.
 */
export function smoothed(column, weight) {
  let [sum, share] = [0, 0];
  return column.map((value) => {
    if (value === null || !Number.isFinite(value)) return value;
    sum = weight * sum + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return sum / share;
  });
}

/** A scalar that is a loss is drawn over the training loss: `val_loss`, `loss/val`. */
export function isLoss(name) {
  return /(^|[^a-z])loss([^a-z]|$)/i.test(name);
}
