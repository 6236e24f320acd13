// A round is one attempt at a step: its share, its averages, and the faults found in them.

import { performance } from 'node:perf_hooks';

import { blockElements, fromBytes } from './digests.js';
import { Order } from './order.js';
import { cover, grainsOf, mark, scale, sum } from './tree.js';

const FAULTS = {
  BLOCK_FAULT_KIND_NON_FINITE: 'NON_FINITE_GRADIENT',
  BLOCK_FAULT_KIND_NON_FINITE_AVERAGE: 'NON_FINITE_AVERAGE',
  BLOCK_FAULT_KIND_ENCODING_OVERFLOW: 'ENCODING_OVERFLOW',
};

/** The current round. It validates and decides; the worker sends the results to the coordinator. */
export class Round {
  held = false;
  samples = 0;
  contributions = []; // {weight, lossSum, gradients, node}, in rising order; none without samples
  backwards = 0;
  busyS = 0; // how long the gradients took
  ownNorm = 0; // the L2 norm of the gradient, before it was limited
  totalWeight = null;
  chunks = [];
  #waiting = new Map();
  #silent = 0;

  constructor(work, blocks) {
    this.work = work;
    this.averages = blocks.map((block) => new Float32Array(blockElements(block)));
  }

  /** Assigns each chunk to a reducer; throws if the map of reducers is invalid. */
  map(blocks, size, shares) {
    this.chunks = cut(blocks, size, shares);
    this.reducers = new Set(this.chunks.map((chunk) => chunk.address));
    for (const chunk of this.chunks) this.#waiting.set(`${chunk.block}:${chunk.offset}`, chunk);
  }

  /** Computes the share: the sums of its nodes if the plan has a grain, else the mean over it, limited
   * to the norm `most` (0: no limit). Returns the fault that forbids sending them, or null. */
  compute(model, plan, blocks, most) {
    const { epoch, positions, rank } = this.work;
    const order = new Order(BigInt(plan.seed), BigInt(epoch), BigInt(plan.datasetSize));
    if (plan.grain) {
      let grains;
      try {
        grains = grainsOf(this.work, plan.grain);
      } catch (error) {
        return { kind: 'PROTOCOL', message: error.message };
      }
      this.#computeNodes(model, order, grains, plan.grain, blocks);
    } else {
      this.#computeMean(model, order, positions, most);
    }
    for (const { gradients, lossSum } of this.contributions) {
      const bad = defect(gradients, lossSum);
      if (bad) return { ...bad, rank };
    }
    return null;
  }

  #gradient(model, order, positions) {
    this.samples += positions.length;
    this.backwards += 1;
    const began = performance.now();
    const found = model.gradient(positions.map((position) => Number(order.at(position))));
    this.busyS += (performance.now() - began) / 1000;
    return { weight: positions.length, ...found };
  }

  #computeMean(model, order, ranges, most) {
    const positions = [];
    for (const { start, stop } of ranges) {
      for (let p = BigInt(start); p < BigInt(stop); p += 1n) positions.push(p);
    }
    if (positions.length === 0) return;
    const mean = this.#gradient(model, order, positions);
    this.ownNorm = norm(mean.gradients);
    if (most > 0) limit(mean.gradients, this.ownNorm, most);
    this.contributions = [mean];
  }

  /** Computes each grain by itself, and adds up the maximal nodes. */
  #computeNodes(model, order, { owned, count }, grain, blocks) {
    const leaf = (index) => {
      const one = this.#gradient(model, order, owned.get(index));
      scale(one.gradients, one.weight, grain, count);
      mark(one.gradients, blocks);
      return one;
    };
    this.contributions = cover([0, count], owned).map(([first, stop]) => {
      const node = { first, grains: stop - first, batchGrains: count, grain };
      return { ...sum([first, stop], leaf), node };
    });
  }

  /** The sum over all contributions of `weight` or `lossSum`. */
  sum(name) {
    return this.contributions.reduce((total, each) => total + each[name], 0);
  }

  /** Weight and loss of each node, for StepReady. */
  get nodeLosses() {
    return this.contributions.filter(({ node }) => node).map(
      ({ node, weight, lossSum }) => ({ first: node.first, grains: node.grains, weight, lossSum }),
    );
  }

  /** Handles a reducer's answer for this round. Returns the fault to forward, or null; throws if an
   * average is invalid. */
  hear({ averagedBlock, blockFault, staleRound, roundAborted, corrupt }) {
    if (corrupt) {
      const { block, elementOffset: element } = averagedBlock;
      const message = 'an average does not match its CRC-32C: it was changed on its way to this worker';
      return { kind: 'CORRUPT_CHUNK', rank: this.work.rank, block, element, message };
    }
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
    const { message, corrupt: chunk } = roundAborted;
    return chunk ? { kind: 'CORRUPT_CHUNK', ...chunk, message } : { kind: 'DATA_STREAM_LOST', message };
  }

  /** Stores one average. All averages must agree on total weight and world size (rule 15). */
  #take(average) {
    const { group, sequence, worldSize, totalWeight, block, elementOffset, payload } = average;
    if (group || sequence) throw new Error('an average belongs to another exchange');
    if (worldSize !== this.work.worldSize) {
      throw new Error(`an average has world_size ${worldSize}, and the round has ${this.work.worldSize}`);
    }
    if (totalWeight !== (this.totalWeight ?? totalWeight)) {
      throw new Error(`averages have different total weights: ${this.totalWeight} and ${totalWeight}`);
    }
    this.totalWeight = totalWeight;
    if (totalWeight === 0 && Number(average.elementCount) === 0) {
      this.#silent += 1;
      return;
    }
    const name = `${block}:${elementOffset}`;
    const chunk = this.#waiting.get(name);
    const fits = chunk && Number(average.elementCount) === chunk.count && payload?.length === 4 * chunk.count;
    if (!fits || average.encoding !== 'ENCODING_FLOAT32') {
      throw new Error(`the average of block ${block} from ${elementOffset} on is not one that this round awaits`);
    }
    this.#waiting.delete(name);
    fromBytes(this.averages[block].subarray(chunk.offset, chunk.offset + chunk.count), payload);
  }

  /** Whether every average arrived, or every reducer reported that all ranks abstained. */
  get complete() {
    return this.#waiting.size === 0 || this.#silent === this.reducers.size;
  }

  /** The L2 norm of the averages. */
  get norm() {
    return norm(this.averages);
  }

  /** How long this attempt computed, and how much. Nothing is kept of an earlier attempt. */
  get timings() {
    return { busyS: this.busyS, microBatches: this.backwards, computed: this.samples };
  }
}

/** The L2 norm of all blocks together, in float64. */
function norm(blocks) {
  let sum = 0;
  for (const block of blocks) for (const number of block) sum += number * number;
  return Math.sqrt(sum);
}

/** Scales a gradient of norm `own` down to the norm `most`. A norm that is not finite stays, so that
 * the value is found. */
function limit(gradients, own, most) {
  if (!(own > most) || !Number.isFinite(own)) return;
  for (const block of gradients) for (let i = 0; i < block.length; i += 1) block[i] *= most / own;
}

/** Chunks in the layout's order. The reducer that has a chunk's first element averages it. */
function cut(blocks, size, shares) {
  const chunks = [];
  let flat = 0;
  blocks.forEach((block, index) => {
    const whole = blockElements(block);
    for (let offset = 0; offset < whole; offset += size) {
      const count = Math.min(size, whole - offset);
      const [begin, end] = [flat + offset, flat + offset + count];
      const share = shares.find((s) => Number(s.startElement) <= begin && end <= Number(s.stopElement));
      if (!share) throw new Error(`the map of reducers does not cover block ${index} from ${offset} on`);
      chunks.push({ block: index, offset, count, address: share.address });
    }
    flat += whole;
  });
  return chunks;
}

/** The fault if the loss or a gradient is not finite; they must not be sent then. */
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
