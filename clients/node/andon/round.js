// A round is one attempt at a step: its share, its averages, and the faults found in them.

import { performance } from 'node:perf_hooks';

import { blockElements, fromBytes } from './digests.js';
import { Order } from './order.js';
import { cover, grainsOf, mark, positionsOf, scale, sum } from './tree.js';
import { Verification } from './verification.js';

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
  sequence = 0; // the exchange that is made
  outgoing = []; // what this rank contributes to it
  verification = null; // only in a round whose assignment has `attests`
  #blocks;
  #grain; // samples of a grain; 0: none
  #incoming; // where its averages go
  #weight = null; // their total weight
  #waiting = new Map();
  #silent = 0;

  constructor(work, blocks, grain) {
    this.work = work;
    this.#blocks = blocks;
    this.#grain = grain;
    this.averages = this.#incoming = blank(blocks);
  }

  /** Assigns each chunk to a reducer; throws if the map of reducers is invalid. */
  map(size, shares) {
    this.chunks = cut(this.#blocks, size, shares);
    this.reducers = new Set(this.chunks.map((chunk) => chunk.address));
    this.#await();
  }

  #await() {
    this.#waiting = new Map(this.chunks.map((chunk) => [`${chunk.block}:${chunk.offset}`, chunk]));
    this.#silent = 0;
    this.#weight = null;
  }

  /** Computes the share: the sums of its nodes if the plan has a grain, else the mean over it, limited
   * to the norm `most` (0: no limit). Returns the fault that forbids sending them, or null. */
  compute(model, plan, most) {
    const { epoch, positions, rank, verifies } = this.work;
    const order = new Order(BigInt(plan.seed), BigInt(epoch), BigInt(plan.datasetSize));
    if (this.#grain) {
      let grains, verified;
      try {
        grains = grainsOf(this.work, this.#grain);
        verified = positionsOf(this.work, verifies, this.#grain);
      } catch (error) {
        return { kind: 'PROTOCOL', message: error.message };
      }
      this.#computeNodes(model, order, grains, verified);
    } else {
      this.#computeMean(model, order, positions, most);
    }
    for (const { gradients, lossSum } of this.contributions) {
      const bad = defect(gradients, lossSum);
      if (bad) return { ...bad, rank };
    }
    this.outgoing = this.contributions;
    return null;
  }

  #gradient(model, samples) {
    this.samples += samples.length;
    this.backwards += 1;
    const began = performance.now();
    const found = model.gradient(samples);
    this.busyS += (performance.now() - began) / 1000;
    return found;
  }

  #computeMean(model, order, ranges, most) {
    const positions = [];
    for (const { start, stop } of ranges) {
      for (let p = BigInt(start); p < BigInt(stop); p += 1n) positions.push(p);
    }
    if (positions.length === 0) return;
    const mean = this.#gradient(model, positions.map((position) => Number(order.at(position))));
    this.ownNorm = norm(mean.gradients);
    if (most > 0) limit(mean.gradients, this.ownNorm, most);
    this.contributions = [{ weight: positions.length, ...mean }];
  }

  /** Computes each grain of the share by itself, and adds up its maximal nodes. In a verified round
   * it does so with other workers' grains first; nothing of those is contributed or counted. */
  #computeNodes(model, order, { owned, count }, verified) {
    const grain = this.#grain;
    const nodesOf = (grains, gradient, attested) => cover([0, count], grains).map(([first, stop]) => {
      const leaf = (index) => {
        const samples = grains.get(index).map((position) => Number(order.at(position)));
        const one = { weight: samples.length, ...gradient(samples) };
        scale(one.gradients, one.weight, grain, count);
        mark(one.gradients, this.#blocks);
        // Before an addition changes it.
        attested?.push(this.verification.attestation(index, 1, one.gradients, samples));
        return one;
      };
      const made = sum([first, stop], ([at, end]) => (end - at === 1 ? leaf(at) : null));
      const node = { first, grains: stop - first, batchGrains: count, grain };
      if (node.grains > 1) attested?.push(this.verification.attestation(first, node.grains, made.gradients));
      return { ...made, node };
    });
    if (this.work.attests) this.verification = new Verification(this.work, model, this.#blocks);
    const { own, others } = this.verification ?? {};
    const theirs = nodesOf(verified, (samples) => model.gradient(samples), others);
    this.contributions = nodesOf(owned, (samples) => this.#gradient(model, samples), own);
    this.verification?.keep([...theirs, ...this.contributions]);
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
    if (group || sequence !== this.sequence) throw new Error('an average belongs to another exchange');
    if (worldSize !== this.work.worldSize) {
      throw new Error(`an average has world_size ${worldSize}, and the round has ${this.work.worldSize}`);
    }
    if (totalWeight !== (this.#weight ?? totalWeight)) {
      throw new Error(`averages have different total weights: ${this.#weight} and ${totalWeight}`);
    }
    this.#weight = totalWeight;
    if (sequence === 0) this.totalWeight = totalWeight;
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
    fromBytes(this.#incoming[block].subarray(chunk.offset, chunk.offset + chunk.count), payload);
  }

  /** Begins the next exchange, of a sum whose owner sends it to all; false if there is none left.
   * Throws if the assignment's sums do not make up the batch. */
  next() {
    const relayed = this.verification?.relayed ?? [];
    if (this.sequence > 0) this.verification.take(relayed[this.sequence - 1], this.#incoming);
    if (this.sequence === relayed.length) {
      this.verification?.finish(this.averages, this.totalWeight, this.#grain);
      return false;
    }
    const { first, grains, rank } = relayed[this.sequence];
    this.sequence += 1;
    this.outgoing = rank === this.work.rank ? [{ weight: 1, gradients: this.verification.sumOf(first, grains) }] : [];
    this.#incoming = blank(this.#blocks);
    this.#await();
    return true;
  }

  /** Whether every average of the exchange arrived, or every reducer reported that all ranks abstained. */
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

const blank = (blocks) => blocks.map((block) => new Float32Array(blockElements(block)));

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
