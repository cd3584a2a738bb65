/** Names of tokens and heads. */

import { bdi, el } from "./dom.js";
import { shortenToken } from "./format.js";

/** Return L2H3 for head 3 of layer 2. */
export const headName = (layer, head) => `L${layer}H${head}`;

/**
 * Return [layer, head] of a name, or null if it is not that of a head.
 *
 * @param {string} name
 * @returns {[number, number] | null}
 */
export function parseHead(name) {
  const match = /^L(\d+)H(\d+)$/.exec(name);
  return match && [Number(match[1]), Number(match[2])];
}

/** Create the name of a token. */
export const tokenName = text => bdi(shortenToken(text), "token");

/** Return token i of a text with its position, as nodes. */
export const labelToken = ({ tokens }, i) => [tokenName(tokens[i]), el("small", {}, ` ${i}`)];
