// Logistic regression without a framework; trains with examples/logistic.py and the other clients.
//
//   ANDON_ADDRESS=127.0.0.1:7070 ANDON_RUN_ID=demo node logistic.js --steps 50

import { readFileSync } from 'node:fs';
import { parseArgs } from 'node:util';

import { toBytes } from './andon/digests.js';
import { token } from './andon/wire.js';
import { Lost, Refused, Worker } from './andon/worker.js';

const [FEATURES, GROUPS, BATCH, SEED] = [8, 5, 32, 11];
const RATE = Math.fround(0.1);
// One optimizer with one group of two parameters, as examples/logistic.py has it.
const OPTIMIZERS = [{
  dict: [['state', { dict: [] }], ['param_groups', [{ dict: [['lr', 0.1], ['params', [0, 1]]] }]]],
}];

const block = (kind, name, parameter, shape) => ({
  kind: `BLOCK_KIND_${kind}`, name, components: [{ name: parameter, shape, dtype: 'DTYPE_FLOAT32' }],
});
// In sending order: the reverse of the parameters'.
const BLOCKS = [
  block('EMBEDDING', 'group', 'group.weight', [GROUPS, 1]),
  block('OTHER', 'linear.weight', 'linear.weight', [1, FEATURES]),
];

/** The log-odds of a label: linear in the features, plus an offset for each group. */
class Logistic {
  linear = Float32Array.from({ length: FEATURES }, (_, i) => 0.01 * (i + 1));
  group = new Float32Array(GROUPS);
  parameters = [
    { name: 'linear.weight', shape: [1, FEATURES], data: this.linear },
    { name: 'group.weight', shape: [GROUPS, 1], data: this.group },
  ];

  constructor(rows) {
    this.rows = rows;
  }

  gradient(samples) {
    const linear = new Float64Array(FEATURES);
    const group = new Float64Array(GROUPS);
    let lossSum = 0;
    for (const index of samples) {
      const { features, of, label } = this.rows[index];
      const score = features.reduce((sum, x, i) => sum + this.linear[i] * x, this.group[of]);
      lossSum += Math.max(score, 0) - score * label + Math.log1p(Math.exp(-Math.abs(score)));
      const fault = 1 / (1 + Math.exp(-score)) - label;
      features.forEach((x, i) => {
        linear[i] += fault * x;
      });
      group[of] += fault;
    }
    const mean = (sums) => Float32Array.from(sums, (sum) => sum / samples.length);
    return { gradients: [mean(group), mean(linear)], lossSum };
  }

  sample(index) {
    const { features, of, label } = this.rows[index];
    return toBytes(Float32Array.of(...features, of, label));
  }

  apply(averages) {
    [this.group, this.linear].forEach((weights, b) => {
      for (let i = 0; i < weights.length; i += 1) {
        // JavaScript computes in float64, so each operation is rounded to float32 explicitly.
        weights[i] = Math.fround(weights[i] - Math.fround(RATE * averages[b][i]));
      }
    });
  }
}

function load(file) {
  return readFileSync(file, 'utf8').trim().split('\n').map((line) => {
    const numbers = line.split(',').map(Number);
    const features = numbers.slice(0, FEATURES).map((x) => x / 16);
    return { features, of: numbers[FEATURES], label: numbers[FEATURES + 1] };
  });
}

async function main() {
  const { values } = parseArgs({
    options: {
      steps: { type: 'string', default: '50' },
      // Samples of a grain: the same bits on any line; 0: none.
      grain: { type: 'string', default: process.env.ANDON_SAME_BITS === '1' ? '3' : '0' },
      data: { type: 'string', default: new URL('../data/samples.csv', import.meta.url).pathname },
    },
  });
  const { ANDON_ADDRESS: address, ANDON_RUN_ID: runId, ANDON_TLS_DIR: tls, RANK: rank } = process.env;
  if (!address) throw new Error('ANDON_ADDRESS is not set: start a line with `andon serve`, and name it there');
  const rows = load(values.data);
  const [totalSteps, grain] = [Number(values.steps), Number(values.grain)];
  const plan = { datasetSize: rows.length, globalBatch: BATCH, seed: SEED, totalSteps, grain };
  const slot = rank ? Number(rank) : undefined;
  const model = new Logistic(rows);
  const worker = new Worker(
    { address, runId, slot, tls, token: token(), blocks: BLOCKS, plan, optimizers: OPTIMIZERS }, model,
  );
  await worker.run();
  const weights = Buffer.concat([toBytes(model.linear), toBytes(model.group)]).toString('hex');
  const digest = worker.digest.toString('hex');
  console.log(JSON.stringify({ step: worker.step, loss: worker.loss, digest, weights }));
}

main().catch((error) => {
  console.error(`node: ${error instanceof Refused || error instanceof Lost ? error.message : error.stack}`);
  process.exitCode = error instanceof Refused ? 4 : error instanceof Lost ? 5 : 1;
});
