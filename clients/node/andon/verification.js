// Verification: in some rounds a worker computes grains of others as well, and says what it has made.
// docs/protocol-same-bits.md, section 37.
//
// It attests hashes of each grain and each node, of its own and of what it verifies. It also makes the
// mean of all sums by itself: of those that it has, and of those that their owners send to all.

import { xxh3 } from '@node-rs/xxhash';

import { elements, toBytes } from './digests.js';
import { divide, sum } from './tree.js';

export const CAPABILITY = 'verifies.v1';

/** Of a batch of more positions, the samples of a grain have one hash. */
const MAX_HASHED_SAMPLES = 32768;

/** XXH3-128 in its canonical form: big-endian. */
export function hash(bytes) {
  const number = xxh3.xxh128(bytes);
  const digest = Buffer.alloc(16);
  digest.writeBigUInt64BE(number >> 64n, 0);
  digest.writeBigUInt64BE(BigInt.asUintN(64, number), 8);
  return digest;
}

function shortHash(bytes) {
  const digest = Buffer.alloc(8);
  digest.writeBigUInt64BE(xxh3.xxh64(bytes));
  return digest;
}

/** The hash of some hashes. */
export const digestOf = (hashes) => hash(Buffer.concat(hashes));

/** The hash of each component of a sum. One that is absent, and begins with -0.0, has that of no bytes. */
export function componentHashes(gradients, blocks) {
  return blocks.flatMap(({ components }, block) => {
    let at = 0;
    return components.map(({ shape }) => {
      const numbers = gradients[block].subarray(at, at += elements(shape));
      return hash(Object.is(numbers[0], -0) ? Buffer.alloc(0) : toBytes(numbers));
    });
  });
}

const nameOf = (first, grains) => `${first}+${grains}`;

/** What a worker attests of one round. */
export class Verification {
  own = []; // attestations of what it contributes
  others = []; // and of what it verifies
  #averagesDigest;
  #meanCheck;
  #work;
  #model;
  #blocks;
  #sums = new Map(); // the vectors of each node that is here
  #digests = []; // of the relayed nodes, as they came

  constructor(work, model, blocks) {
    this.#work = work;
    this.#model = model;
    this.#blocks = blocks;
  }

  /** What this worker says of a sum; `samples` are those of a single grain. */
  attestation(first, grains, gradients, samples) {
    const { itemised, verifies } = this.#work;
    const hashes = componentHashes(gradients, this.#blocks);
    const attested = { first, grains, digest: digestOf(hashes) };
    if (samples) attested.samples = this.#hashesOf(samples);
    if (samples && itemised && verifies.includes(first)) attested.components = Buffer.concat(hashes);
    return attested;
  }

  #hashesOf(samples) {
    const { start, stop } = this.#work.batch;
    const hashes = Buffer.concat(samples.map((index) => shortHash(this.#model.sample(index))));
    return Number(stop) - Number(start) > MAX_HASHED_SAMPLES ? shortHash(hashes) : hashes;
  }

  /** The relayed nodes: each has an exchange of its own, after that of the gradients. */
  get relayed() {
    return this.#work.sums.filter((each) => each.relayed);
  }

  /** Keeps the nodes that this worker has made, if it is to make the mean. */
  keep(nodes) {
    if (this.#work.sums.length === 0) return;
    for (const { node, gradients } of nodes) this.#sums.set(nameOf(node.first, node.grains), gradients);
  }

  /** The vectors of a node that this worker has made. */
  sumOf(first, grains) {
    return this.#sums.get(nameOf(first, grains));
  }

  /** A relayed node came. */
  take({ first, grains }, gradients) {
    this.#digests.push(digestOf(componentHashes(gradients, this.#blocks)));
    this.#sums.set(nameOf(first, grains), gradients);
  }

  /** All is here: hashes the averages, and compares them with the mean of all sums. Throws if the sums
   * that were assigned do not make up the batch. */
  finish(averages, totalWeight, grain) {
    this.#averagesDigest = digestOf(componentHashes(averages, this.#blocks));
    const { batch, sums } = this.#work;
    if (sums.length === 0) return;
    const count = Math.ceil((Number(batch.stop) - Number(batch.start)) / grain);
    const { gradients: expected } = sum([0, count], ([first, stop]) => {
      const there = this.sumOf(first, stop - first);
      return there ? { gradients: there.map((numbers) => numbers.slice()) } : null;
    });
    divide(expected, totalWeight, grain, count);
    const [made, came] = [expected, averages].map((each) => digestOf(each.map((block) => hash(toBytes(block)))));
    this.#meanCheck = { expected: made, came, relayed: this.#digests, apart: apart(expected, averages) };
  }

  /** The fields of StepReady. */
  get report() {
    const attested = [...this.own, ...this.others];
    return { attested, averagesDigest: this.#averagesDigest, meanCheck: this.#meanCheck };
  }
}

/** The first element whose bits differ, or null. */
function apart(expected, came) {
  for (const [block, numbers] of expected.entries()) {
    const element = numbers.findIndex((number, i) => !Object.is(number, came[block][i]));
    if (element >= 0) return { block, element, expected: numbers[element], came: came[block][element] };
  }
  return null;
}
