// The two digests that all workers must agree on: docs/protocol-data.md, sections 7 and 10.

import { createHash } from 'node:crypto';

/** The number of elements in a shape. */
export const elements = (shape) => shape.reduce((count, size) => count * Number(size), 1);

/** The number of elements in a block. */
export const blockElements = (block) =>
  block.components.reduce((count, part) => count + elements(part.shape), 0);

/** SHA-256 of a layout's blocks; kinds and dtypes are the enums' names. */
export function layoutDigest(blocks) {
  const lines = ['andon.layout.v1'];
  for (const block of blocks) {
    lines.push(`block\t${block.kind.replace('BLOCK_KIND_', '')}\t${block.name}`);
    for (const part of block.components) {
      const dtype = part.dtype.replace('DTYPE_', '');
      lines.push(`component\t${part.name}\t${dtype}\t${part.shape.join(',')}`);
    }
  }
  return createHash('sha256').update(lines.map((line) => `${line}\n`).join('')).digest();
}

/** SHA-256 of parameters `{name, dtype, shape, bytes}`, in the order of the state dict. */
export function weightsDigest(tensors) {
  const digest = createHash('sha256');
  for (const { name, dtype, shape, bytes } of tensors) {
    digest.update(`${name}\0${dtype}\0${shape.join(',')}\0`).update(bytes);
  }
  return digest.digest();
}

/** A Float32Array's numbers in wire order: little-endian, without padding. */
export function toBytes(numbers) {
  const bytes = Buffer.alloc(4 * numbers.length);
  numbers.forEach((number, i) => bytes.writeFloatLE(number, 4 * i));
  return bytes;
}

/** Writes little-endian float32 into a Float32Array. */
export function fromBytes(numbers, bytes) {
  for (let i = 0; i < numbers.length; i += 1) numbers[i] = bytes.readFloatLE(4 * i);
}
