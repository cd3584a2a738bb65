/** The prediction breakdown of one token: logit lens and direct logit attribution. */

import { linear, logitsOf, modelScales, normalize, outputWeight } from "./layers.js";
import { argTop, logNormalizers } from "./logits.js";

const PROMOTED_TOKENS = 3;

/**
 * Break down the prediction after token i (glass/heads/measure/logit_attribution.py does the same):
 * the loss after each block, and what each component adds to the logit of each target, centered over
 * the vocabulary.
 *
 * @param {import("./forward.js").ForwardPass} pass
 * @param {number} i
 * @param {[number, number]} of - Layer and head whose promoted tokens are named.
 * @param {number} answer - Id of a next token that is explained.
 * @param {number} predictedTokens - Likeliest next tokens that are explained too.
 *
 * References: Elhage et al. 2021; nostalgebraist 2020.
 */
export function breakDown(pass, i, of, answer, predictedTokens) {
  const { config, ids, T } = pass;
  const { H } = pass.sizes;
  const V = config.vocab_size;
  const logits = logitsAfterBlocks(pass, i);
  const next = argTop(logits.at(-1), predictedTokens);
  const targets = [answer, ...next];
  const lossOf = row => logNormalizers(row, V)[0] - row[ids[i + 1]];
  const lens = logits.map(row => (i + 1 < T ? lossOf(row) : Number.NaN));
  const components = normalizedComponents(pass, i);
  const [layer, head] = of;
  return {
    i,
    of,
    targets,
    lens,
    direct: attributeLogits(pass, components, targets, logits.at(-1)),
    writes: pushedTokens(pass, components[1 + layer * (H + 1) + head]),
  };
}

/** Return the row (C) of token i. */
const rowAt = (rows, i, C) => rows.data.subarray(i * C, (i + 1) * C);

/** Return the logits after token i if the model ended before the first block and after each. */
function logitsAfterBlocks({ weights, config, layers, output, sizes }, i) {
  const states = [...layers.map(({ x }) => x), output];
  return states.map(rows => logitsOf(weights, config, rowAt(rows, i, sizes.C)));
}

/** Return what each component but the biases wrote at token i, (C), through the final norm. */
function normalizedComponents(pass, i) {
  const { weights, config, output } = pass;
  const { C } = pass.sizes;
  const scales = modelScales(config, rowAt(output, i, C));
  const gain = weights["norm.weight"]?.data;
  return pass
    .components()
    .filter(({ name }) => !name.endsWith("bias"))
    .map(({ wrote }) => normalize(wrote.slice(i * C, (i + 1) * C), C, scales, gain));
}

/**
 * Return what each component adds to the logit of each target minus the mean of all logits, and in
 * the last row what the biases add.
 */
function attributeLogits({ weights, config, sizes }, components, targets, logits) {
  const { C } = sizes;
  const V = config.vocab_size;
  const { data: E } = outputWeight(weights);
  const mean = meanOutputRow(E, V, C);
  const contribution = (y, id) =>
    y.reduce((sum, value, k) => sum + value * (E[id * C + k] - mean[k]), 0);
  const direct = components.map(y => targets.map(id => contribution(y, id)));
  const meanLogit = logits.reduce((a, b) => a + b, 0) / V;
  const biases = targets.map((id, k) => {
    const attributed = direct.reduce((sum, row) => sum + row[k], 0);
    return logits[id] - meanLogit - attributed;
  });
  return [...direct, biases];
}

/** Return the mean row of the output weight (V, C). */
function meanOutputRow(E, V, C) {
  const mean = new Float64Array(C);
  for (let id = 0; id < V; id++) {
    for (let k = 0; k < C; k++) mean[k] += E[id * C + k] / V;
  }
  return mean;
}

/** Return the tokens that the output of a head promotes the most, and then those it suppresses. */
function pushedTokens({ weights }, headOutput) {
  const pushed = linear({ "head.weight": outputWeight(weights) }, "head", headOutput, 1);
  const negated = pushed.map(value => -value);
  return [...argTop(pushed, PROMOTED_TOKENS), ...argTop(negated, PROMOTED_TOKENS)];
}
