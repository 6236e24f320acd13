// Grains, and the tree along which they are added: docs/protocol-same-bits.md, sections 31 to 34.
//
// A grain's gradient has the same bits whoever computes it, and the tree depends on the number of
// grains alone. So the mean has the same bits whatever shares the workers have.

import { elements } from './digests.js';

export const CAPABILITY = 'same-bits.v1';
export const TREE_VERSION = 1;

/** The children of a node [first, stop) of several grains. The left one has the greatest power of
 * two of grains that is less than all of them. */
function children([first, stop]) {
  let size = 1;
  while (2 * size < stop - first) size *= 2;
  return [[first, first + size], [first + size, stop]];
}

/** The greatest nodes in a node whose grains all are in the Map `owned`, in rising order. */
export function cover(node, owned) {
  const [first, stop] = node;
  if (owned.size === 0) return [];
  let whole = true;
  for (let grain = first; whole && grain < stop; grain += 1) whole = owned.has(grain);
  if (whole) return [node];
  return stop - first === 1 ? [] : children(node).flatMap((child) => cover(child, owned));
}

/** Adds up what is below a node; each addition of gradients is rounded to float32. `made(node)` is
 * `{weight, lossSum, gradients}` of a node that is there, and null of one that is to be added up. */
export function sum(node, made) {
  const there = made(node);
  if (there) return there;
  if (node[1] - node[0] === 1) throw new Error(`nobody has a sum of grain ${node[0]}`);
  const [total, more] = children(node).map((child) => sum(child, made));
  total.weight += more.weight;
  total.lossSum += more.lossSum;
  more.gradients.forEach((numbers, block) => {
    for (let i = 0; i < numbers.length; i += 1) total.gradients[block][i] += numbers[i];
  });
  return total;
}

/** Makes a leaf of a grain's mean gradient: a product, rounded to float32. */
export function scale(gradients, weight, grain, count) {
  const factor = count === 1 ? 1 : Math.fround(weight / grain);
  for (const numbers of gradients) for (let i = 0; i < numbers.length; i += 1) numbers[i] *= factor;
}

/** Makes the mean of a root, whose weights have a sum: a quotient, rounded to float32. */
export function divide(gradients, totalWeight, grain, count) {
  const divisor = count === 1 ? 1 : Math.fround(totalWeight / grain);
  for (const numbers of gradients) {
    if (totalWeight === 0) numbers.fill(0);
    else for (let i = 0; i < numbers.length; i += 1) numbers[i] /= divisor;
  }
}

/** Adds 0.0 to the first element of each component: -0.0 there would mean that it is absent. */
export function mark(gradients, blocks) {
  blocks.forEach(({ components }, block) => {
    let at = 0;
    for (const { shape } of components) {
      if (elements(shape) > 0) gradients[block][at] += 0;
      at += elements(shape);
    }
  });
}

/** The positions of the grains with these indices; throws if the batch has no such grain. */
export function positionsOf({ batch }, indices, size) {
  const [first, last] = [BigInt(batch?.start ?? 0), BigInt(batch?.stop ?? 0)];
  return new Map(indices.map((index) => {
    const begin = first + BigInt(index * size);
    if (begin >= last) throw new Error(`the batch has no grain ${index}`);
    const length = Math.min(size, Number(last - begin));
    return [index, Array.from({ length }, (_, i) => begin + BigInt(i))];
  }));
}

/** The positions of each grain in a share, and how many grains the batch has; throws if there is a
 * part of a grain. */
export function grainsOf({ batch, positions }, size) {
  const [first, last] = [BigInt(batch?.start ?? 0), BigInt(batch?.stop ?? 0)];
  const owned = new Map();
  for (const { start, stop } of positions) {
    for (let position = BigInt(start); position < BigInt(stop); position += 1n) {
      if (position < first || position >= last) throw new Error('assigned a position outside of the batch');
      const grain = Math.floor(Number(position - first) / size);
      owned.set(grain, [...(owned.get(grain) ?? []), position]);
    }
  }
  const all = Number(last - first);
  for (const [grain, { length }] of owned) {
    if (length !== Math.min(size, all - grain * size)) throw new Error('assigned a part of a grain');
  }
  return { owned, count: Math.ceil(all / size) };
}
