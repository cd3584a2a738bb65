/** Patches of activation patching: their names, and where two texts differ. */

/** @type {Record<string, Patch["kind"]>} */
const PATCH_KINDS = { T: "residual", H: "heads", MLP: "mlp" };

/**
 * Return the patch of a name: L3T5 is the residual stream before block 3 at token 5, L2H1 a head and
 * L2MLP an MLP.
 *
 * @param {string} name
 * @returns {Patch | null} null if it is no name of a patch.
 */
export function parsePatch(name) {
  const match = /^L(\d{1,4})(?:(T|H)(\d{1,6})|(MLP))$/.exec(name);
  if (!match) return null;
  const [, layer, kind = "MLP", index = 0] = match;
  return { kind: PATCH_KINDS[kind], layer: Number(layer), index: Number(index) };
}

/** Return the first token that differs between two texts; the shorter length if none does. */
export function firstDifference(ids, otherIds) {
  const length = Math.min(ids.length, otherIds.length);
  const different = ids.slice(0, length).findIndex((id, t) => id !== otherIds[t]);
  return different < 0 ? length : different;
}
