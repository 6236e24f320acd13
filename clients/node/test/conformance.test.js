// The vectors of conformance/ that a worker needs.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import test from 'node:test';

import { checksumsOf, headerIntact, payloadIntact } from '../andon/checksums.js';
import { blockElements, fromBytes, layoutDigest, toBytes, weightsDigest } from '../andon/digests.js';
import { Order, splitmix64 } from '../andon/order.js';
import { cover, divide, scale, sum } from '../andon/tree.js';
import { digestOf, hash } from '../andon/verification.js';
import { v1 } from '../andon/wire.js';

const vectors = (name) =>
  JSON.parse(readFileSync(new URL(`../../../conformance/${name}.json`, import.meta.url)));

test('the order of samples', () => {
  const { splitmix64: outputs, orders } = vectors('order');
  for (const { state, output } of outputs) assert.equal(`${splitmix64(BigInt(state))}`, output);
  for (const { seed, epoch, size, positions, samples } of orders) {
    const order = new Order(BigInt(seed), BigInt(epoch), BigInt(size));
    assert.deepEqual(positions.map((position) => `${order.at(BigInt(position))}`), samples);
  }
});

test("the layout's digest", () => {
  for (const { blocks, elements, digest } of vectors('layout').layouts) {
    assert.equal(layoutDigest(blocks).toString('hex'), digest);
    assert.equal(blocks.reduce((sum, block) => sum + blockElements(block), 0), elements);
  }
});

test("the weights' digest", () => {
  for (const { tensors, sha256 } of vectors('weights').weights) {
    const parameters = tensors.map((tensor) => ({ ...tensor, bytes: Buffer.from(tensor.bytes, 'hex') }));
    assert.equal(weightsDigest(parameters).toString('hex'), sha256);
  }
});

test('checksums', () => {
  const golden = (name) => readFileSync(new URL(`../../../conformance/messages/${name}.checksums.binpb`, import.meta.url));
  const { requestDeserialize, responseDeserialize } = v1.Reducer.service.Reduce;
  for (const name of ['block_gradient', 'abstain', 'block_gradient.node']) {
    const { headerCrc32c, crc32c, ...rest } = requestDeserialize(golden(`ReduceRequest.${name}`));
    const expected = name === 'abstain' ? { headerCrc32c } : { headerCrc32c, crc32c };
    assert.deepEqual(checksumsOf(rest), expected);
  }
  const answer = responseDeserialize(golden('ReduceResponse.averaged_block'));
  const intact = () => [headerIntact(answer), payloadIntact(answer)];
  assert.deepEqual(intact(), [true, true]);
  answer.averagedBlock.payload[0] ^= 1;
  assert.deepEqual(intact(), [true, false]);
  answer.averagedBlock.totalWeight += 1;
  assert.deepEqual(intact(), [false, false]);
});

test('the tree over grains', () => {
  const { covers, means } = vectors('tree');
  for (const { name, grains, runs, nodes } of covers) {
    const owned = new Map();
    for (const [first, stop] of runs) for (let grain = first; grain < stop; grain += 1) owned.set(grain, []);
    assert.deepEqual(cover([0, grains], owned), nodes, name);
  }
  for (const { name, grain, grains, element_count: elements, ranks, answer } of means) {
    const leaf = ([index, stop]) => {
      if (stop - index > 1) return null;
      const { weight, gradient } = grains[index];
      const numbers = new Float32Array(elements).fill(-0);
      if (weight > 0) {
        fromBytes(numbers, Buffer.from(gradient, 'hex'));
        scale([numbers], weight, grain, grains.length);
      }
      return { weight, lossSum: 0, gradients: [numbers] };
    };
    for (const { node, weight, payload } of ranks.flat()) {
      const found = sum(node, leaf);
      assert.deepEqual([found.weight, toBytes(found.gradients[0]).toString('hex')], [weight, payload], name);
    }
    const { weight, gradients } = sum([0, grains.length], leaf);
    divide(gradients, weight, grain, grains.length);
    assert.equal(toBytes(gradients[0]).toString('hex'), answer.payload, name);
  }
});

test('attestations', () => {
  for (const { name, components, hashes, digest } of vectors('attestations').digests) {
    const found = components.map((hex) => hash(Buffer.from(hex ?? '', 'hex')));
    assert.deepEqual(found.map((each) => each.toString('hex')), hashes, name);
    assert.equal(digestOf(found).toString('hex'), digest, name);
  }
});
