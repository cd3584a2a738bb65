/** Activation patching: activations of one forward pass are copied into another. */

import { ForwardPass } from "./forward.js";
import { norm, outputWeight } from "./layers.js";
import { firstDifference } from "./patches.js";

/**
 * Return a tap that copies activations from another pass.
 *
 * @param {ForwardPass} source - Has read a text with at least as many tokens.
 * @param {Patch[]} patches
 * @returns {Tap}
 */
function createPatchingTap(source, patches) {
  return (name, layer, values, start) => {
    for (const patch of patches) {
      if (patch.kind !== name || patch.layer !== layer) continue;
      copyActivation(source, patch, values, start);
    }
  };
}

/** Copy what a patch names into the values of the tokens from `start` on. */
function copyActivation(source, { kind, layer, index }, values, start) {
  const { H, C, d_v } = source.sizes;
  const { x, gathered, mlp } = source.layers[layer];
  if (kind === "residual") {
    const row = x.data.subarray(index * C, (index + 1) * C);
    if (index >= start) values.set(row, (index - start) * C);
  } else if (kind === "mlp") {
    values.set(mlp.data.subarray(start * C, start * C + values.length));
  } else {
    const first = start * H * d_v;
    for (let place = index * d_v; place < values.length; place += H * d_v) {
      values.set(gathered.data.subarray(first + place, first + place + d_v), place);
    }
  }
}

/**
 * The runs on one text with activations that are copied from the pass over another.
 *
 * With the clean text as the source, patching restores an answer on the corrupted text (denoising);
 * the other way round, it removes the answer from the clean text (noising).
 *
 * References: Meng et al. 2022; Wang et al. 2022; Heimersheim and Nanda 2024.
 */
export class Patching {
  /**
   * @param {ForwardPass} source
   * @param {ForwardPass} base - Has read a text with as many tokens.
   * @param {Answers} answers
   * @param {Patch[]} kept - Patches of every run.
   */
  constructor(source, base, answers, kept) {
    this.source = source;
    this.answers = answers;
    this.kept = kept;
    this.first = firstDifference(source.ids, base.ids); // tokens before it cannot change
    this.patched = new ForwardPass(base.weights, base.config, [...base.off]); // with `kept` only
    this.patched.tap = createPatchingTap(source, kept);
    this.patched.runFrom(base, 0, this.first);
  }

  /**
   * Measure the logit difference with the kept patches and that of one cell.
   *
   * @param {"residual" | "component"} kind - Residual stream: layers × tokens. Components: layers ×
   *   heads, with the MLP in a last column, if the model has MLPs.
   */
  *measureCells(kind) {
    const { weights, config, off, T } = this.patched;
    const unpatched = logitDifference(this.patched, this.answers);
    const pass = new ForwardPass(weights, config, [...off]);
    for (let layer = 0; layer < this.patched.sizes.L; layer++) {
      const patches =
        kind === "residual" ? residualPatches(layer, T) : componentPatches(layer, config);
      for (const [column, patch] of patches.entries()) {
        const start = kind === "residual" ? column : this.first;
        let value = unpatched;
        if (start >= this.first && start < T) {
          pass.tap = createPatchingTap(this.source, [...this.kept, patch]);
          pass.runFrom(this.patched, layer, start);
          value = logitDifference(pass, this.answers);
        }
        yield { cell: [layer, column], value };
      }
    }
  }
}

/** @returns {Patch[]} Those of the residual stream before a block, one for each token. */
const residualPatches = (layer, T) =>
  Array.from({ length: T }, (_, index) => ({ kind: "residual", layer, index }));

/** @returns {Patch[]} Those of the heads of a layer and of its MLP, if it has one. */
function componentPatches(layer, config) {
  /** @type {Patch[]} */
  const patches = [];
  for (let index = 0; index < config.n_head; index++) patches.push({ kind: "heads", layer, index });
  if (config.mlp !== "none") patches.push({ kind: "mlp", layer, index: 0 });
  return patches;
}

/** Return the logit of the answer minus that of the wrong answer after the last token of a pass. */
export function logitDifference(pass, { answer, wrong }) {
  const { weights, config, T } = pass;
  const { C } = pass.sizes;
  const last = pass.output.data.subarray((T - 1) * C, T * C);
  const x = norm(weights, config, "norm", last);
  const { data: E } = outputWeight(weights);
  return x.reduce((sum, value, k) => sum + value * (E[answer * C + k] - E[wrong * C + k]), 0);
}
