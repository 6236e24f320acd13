// The vectors of conformance/ that a worker needs.

import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import test from 'node:test';

import { checksumsOf, headerIntact, payloadIntact } from '../andon/checksums.js';
import { blockElements, layoutDigest, weightsDigest } from '../andon/digests.js';
import { Order, splitmix64 } from '../andon/order.js';
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
  for (const name of ['block_gradient', 'abstain']) {
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
