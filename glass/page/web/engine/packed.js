/** Numbers as they are packed: in base64, compressed, in the page; in float16, also in frames. */

/** Return the base64 of an embedded element, by its number in the page's data. */
export const blobText = number => document.querySelectorAll("script.blob")[number].textContent;

export async function inflate(base64) {
  const bytes = Uint8Array.from(atob(base64), character => character.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(plain).arrayBuffer());
}

export const unpack = number => inflate(blobText(number));

// ---- float16: little-endian, or the low bytes of all and then the high bytes (glass/page/pack.py)

let decodedHalves = null;

function decodeHalf(bits) {
  const sign = bits >> 15 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? Number.NaN : sign * Infinity;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** Decode `count` numbers, each from the bits that `bitsAt` returns. */
function decode(count, bitsAt) {
  decodedHalves ??= Float32Array.from({ length: 65536 }, (_, bits) => decodeHalf(bits));
  const numbers = new Float32Array(count);
  for (let k = 0; k < count; k++) numbers[k] = decodedHalves[bitsAt(k)];
  return numbers;
}

/** @param {DataView} view */
export const decodeHalves = view => decode(view.byteLength / 2, k => view.getUint16(2 * k, true));

/** @param {Uint8Array} bytes */
export function decodeSplitHalves(bytes) {
  const count = bytes.length / 2;
  return decode(count, k => (bytes[count + k] << 8) | bytes[k]);
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
