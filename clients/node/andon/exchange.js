// The data plane: streams to the reducers, and the present round's averages.

import { blockElements, fromBytes, toBytes } from './digests.js';
import { connect, listen, v1, write } from './wire.js';

/** The worker's streams to the reducers. A void round's are thrown away (rule 16). */
export class Exchange {
  #calls = new Map();

  /** `opening` is OpenRound; `told(exchange, answer, error)` hears everything. */
  constructor(home, folder, opening, told) {
    Object.assign(this, { home, folder, opening, told });
  }

  #to(address) {
    if (!this.#calls.has(address)) {
      const client = connect(v1.Reducer, address || this.home, this.folder);
      const call = client.reduce();
      listen(call, (answer) => this.told(this, answer, null), (error) => {
        client.close();
        this.told(this, null, error);
      });
      call.write({ openRound: this.opening });
      this.#calls.set(address, call);
    }
    return this.#calls.get(address);
  }

  /** Ends the streams; nothing of them counts any more. */
  cancel() {
    this.told = () => {};
    for (const call of this.#calls.values()) call.cancel();
  }

  /** Sends a round's gradients, chunk by chunk, or one Abstain to each reducer. */
  async send(round, gradients) {
    const { key, rank, worldSize } = round.work;
    if (round.samples === 0) {
      const abstain = { key, rank, worldSize };
      await Promise.all([...round.reducers].map((each) => write(this.#to(each), { abstain })));
      return;
    }
    for (const { block, offset, count, address } of round.chunks) {
      const blockGradient = {
        key, rank, worldSize, block, elementOffset: offset, elementCount: count,
        operation: 'OPERATION_WEIGHTED_MEAN', encoding: 'ENCODING_FLOAT32', weight: round.samples,
        payload: toBytes(gradients[block].subarray(offset, offset + count)),
      };
      if (!(await write(this.#to(address), { blockGradient }))) return;
    }
  }
}

/** Chunks in the layout's order; each goes to the reducer that has its first element. */
function cut(blocks, size, shares) {
  const chunks = [];
  let flat = 0;
  blocks.forEach((block, index) => {
    const whole = blockElements(block);
    for (let offset = 0; offset < whole; offset += size) {
      const count = Math.min(size, whole - offset);
      const [begin, end] = [flat + offset, flat + offset + count];
      const share = shares.find((s) => Number(s.startElement) <= begin && end <= Number(s.stopElement));
      if (!share) throw new Error(`the map of reducers does not hold block ${index} from ${offset} on`);
      chunks.push({ block: index, offset, count, address: share.address });
    }
    flat += whole;
  });
  return chunks;
}

/** One try at a step. */
export class Round {
  held = false;
  samples = 0;
  lossSum = 0;
  total = null;
  chunks = [];
  #waiting = new Map();
  #silent = 0;

  constructor(work, blocks) {
    this.work = work;
    this.averages = blocks.map((block) => new Float32Array(blockElements(block)));
  }

  /** Says which chunks go where; throws if the map of reducers can't be. */
  map(blocks, size, shares) {
    this.chunks = cut(blocks, size, shares);
    this.reducers = new Set(this.chunks.map((chunk) => chunk.address));
    for (const chunk of this.chunks) this.#waiting.set(`${chunk.block}:${chunk.offset}`, chunk);
  }

  /** Puts one average in its place. All must agree on total weight and world size (rule 15). */
  take(average) {
    const { group, sequence, worldSize, totalWeight, block, elementOffset, payload } = average;
    if (group || sequence) throw new Error('an average of another exchange came');
    if (worldSize !== this.work.worldSize) {
      throw new Error(`an average is over ${worldSize} ranks, not ${this.work.worldSize}`);
    }
    if (totalWeight !== (this.total ?? totalWeight)) {
      throw new Error(`averages are over weights of ${this.total} and ${totalWeight}`);
    }
    this.total = totalWeight;
    if (totalWeight === 0 && Number(average.elementCount) === 0) {
      this.#silent += 1;
      return;
    }
    const name = `${block}:${elementOffset}`;
    const chunk = this.#waiting.get(name);
    const fits = chunk && Number(average.elementCount) === chunk.count && payload?.length === 4 * chunk.count;
    if (!fits || average.encoding !== 'ENCODING_FLOAT32') {
      throw new Error(`the average of block ${block} from ${elementOffset} on is not one that is awaited`);
    }
    this.#waiting.delete(name);
    fromBytes(this.averages[block].subarray(chunk.offset, chunk.offset + chunk.count), payload);
  }

  /** Whether every average came, or every reducer said that there is none. */
  get complete() {
    return this.#waiting.size === 0 || this.#silent === this.reducers.size;
  }

  /** The L2 norm of the averages, in float64. */
  get norm() {
    let sum = 0;
    for (const block of this.averages) for (const number of block) sum += number * number;
    return Math.sqrt(sum);
  }
}
