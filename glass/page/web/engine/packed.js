/** Numbers as they are packed: in base64, compressed, in the page; in float16, also in frames. */

/** Return the base64 of an embedded element, by its number in the page's data. */
export const blobText = number => document.querySelectorAll("script.blob")[number].textContent;

export async function inflate(base64) {
  const bytes = Uint8Array.from(atob(base64), character => character.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(plain).arrayBuffer());
}

export const unpack = number => inflate(blobText(number));

/**
 * Decode float16 numbers: the low bytes of all, then the high bytes (glass/page/pack.py).
 *
 * @param {Uint8Array} bytes
 */
export function decodeSplitHalves(bytes) {
  const count = bytes.length / 2;
  const halves = new Uint16Array(count);
  for (let k = 0; k < count; k++) halves[k] = (bytes[count + k] << 8) | bytes[k];
  return new Float32Array(new Float16Array(halves.buffer));
}

/**
 * Split an array into arrays of some lengths.
 *
 * @template {Float32Array | Int32Array} A
 * @template {string} Name
 * @param {A} array
 * @param {Record<Name, number>} lengths
 */
export function splitArray(array, lengths) {
  const parts = /** @type {Record<Name, A>} */ ({});
  let start = 0;
  for (const [name, length] of Object.entries(lengths)) {
    parts[name] = array.subarray(start, start + length);
    start += length;
  }
  return parts;
}

/**
 * Unpack the model's weights (`pack_weights` of glass/page/pack.py).
 *
 * @param {[string, number[]][]} tensors - Name and shape of each.
 * @param {Uint8Array} bytes
 * @returns {Weights}
 */
export function unpackWeights(tensors, bytes) {
  const lengths = Object.fromEntries(
    tensors.map(([name, shape]) => [name, shape.reduce((a, b) => a * b, 1)]),
  );
  const count = Object.values(lengths).reduce((a, b) => a + b);
  const numbers = splitArray(decodeSplitHalves(bytes), lengths);
  /** @type {Weights} */
  const weights = {};
  for (const [name, shape] of tensors) weights[name] = { shape, data: numbers[name] };
  const areFinite = Object.values(weights).every(({ data }) => data.every(Number.isFinite));
  if (bytes.length !== 2 * count || !areFinite) throw new Error("the stored weights are damaged");
  return weights;
}
