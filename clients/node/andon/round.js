// A round is one try at a step: its share, its averages, and what is wrong with either.

import { blockElements, fromBytes } from './digests.js';
import { Order } from './order.js';

const FAULTS = {
  BLOCK_FAULT_KIND_NON_FINITE: 'NON_FINITE_GRADIENT',
  BLOCK_FAULT_KIND_NON_FINITE_AVERAGE: 'NON_FINITE_AVERAGE',
  BLOCK_FAULT_KIND_ENCODING_OVERFLOW: 'ENCODING_OVERFLOW',
};

/** The round under way. It decides what is true of it; the worker says so to the coordinator. */
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

  /** Computes the share: its gradients, null without samples, or the defect that keeps them here. */
  compute(model, { seed, datasetSize }) {
    const { epoch, positions, rank } = this.work;
    const order = new Order(BigInt(seed), BigInt(epoch), BigInt(datasetSize));
    const samples = [];
    for (const { start, stop } of positions) {
      for (let p = BigInt(start); p < BigInt(stop); p += 1n) samples.push(Number(order.at(p)));
    }
    this.samples = samples.length;
    if (samples.length === 0) return { gradients: null, bad: null };
    const { gradients, lossSum } = model.gradient(samples);
    this.lossSum = lossSum;
    const bad = defect(gradients, lossSum);
    return { gradients, bad: bad && { ...bad, rank } };
  }

  /** Takes what a reducer says of this round; returns the fault to pass on, or null. It throws if
   * an average can't be. */
  hear({ averagedBlock, blockFault, staleRound, roundAborted }) {
    if (averagedBlock) {
      this.#take(averagedBlock);
      return null;
    }
    if (blockFault) {
      const { block, element, value, message } = blockFault;
      const rank = blockFault._rank ? { rank: blockFault.rank } : {};
      return { kind: FAULTS[blockFault.kind] ?? 'PROTOCOL', ...rank, block, element, value, message };
    }
    if (staleRound) {
      return { kind: 'STALE_ROUND', greatest: staleRound.greatest, message: 'the reducer saw a greater key' };
    }
    return { kind: 'DATA_STREAM_LOST', message: roundAborted.message };
  }

  /** Puts one average in its place. All must agree on total weight and world size (rule 15). */
  #take(average) {
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

/** What must not be sent: a loss or a gradient that is not finite. */
function defect(gradients, lossSum) {
  if (!Number.isFinite(lossSum)) {
    return { kind: 'NON_FINITE_LOSS', value: `${lossSum}`, message: `the loss is ${lossSum}` };
  }
  for (const [block, numbers] of gradients.entries()) {
    const element = numbers.findIndex((number) => !Number.isFinite(number));
    if (element >= 0) {
      const message = 'the gradient is not finite';
      return { kind: 'NON_FINITE_GRADIENT', block, element, value: `${numbers[element]}`, message };
    }
  }
  return null;
}
