/**
 * float16 numbers: as glass/page/pack.py stores them, the low bytes of all and then the high bytes, or
 * one after the other.
 */

/** @type {Float64Array | null} */
let decodedHalves = null;

/** Decode the 16 bits of a half-precision number. */
function decodeHalf(bits) {
  const sign = bits >> 15 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? Number.NaN : sign * Infinity;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** Return the number of each of the 65,536 bit patterns. */
function halfTable() {
  decodedHalves ??= Float64Array.from({ length: 65536 }, (_, bits) => decodeHalf(bits));
  return decodedHalves;
}

/**
 * Return a function that takes the next `length` numbers and returns an accessor k → number.
 *
 * @param {Uint8Array} bytes
 * @param {number} [count] - Numbers in all; by default half the bytes.
 * @returns {(length: number) => (k: number) => number}
 */
export function floatReader(bytes, count = bytes.length / 2) {
  const table = halfTable();
  let start = 0;
  return length => {
    const first = start;
    start += length;
    return k => table[(bytes[count + first + k] << 8) | bytes[first + k]];
  };
}

/**
 * Decode little-endian float16 numbers.
 *
 * @param {DataView} view
 * @returns {Float32Array}
 */
export function decodeHalves(view) {
  const table = halfTable();
  const numbers = new Float32Array(view.byteLength / 2);
  for (let k = 0; k < numbers.length; k++) numbers[k] = table[view.getUint16(2 * k, true)];
  return numbers;
}

const NGRAM_KEYS = "ngrams.keys"; // stored last, as float64

/**
 * Unpack the model's weights (glass/page/pack.py, `pack_weights`).
 *
 * @param {[string, number[]][]} tensors - Name and shape of each.
 * @param {Uint8Array} bytes
 * @returns {Record<string, {shape: number[], data: Float32Array | Float64Array}>}
 */
export function unpackWeights(tensors, bytes) {
  const lengthOf = shape => shape.reduce((product, size) => product * size, 1);
  const count = tensors
    .filter(([name]) => name !== NGRAM_KEYS)
    .reduce((sum, [, shape]) => sum + lengthOf(shape), 0);
  const next = floatReader(bytes, count);
  const weights = {};
  for (const [name, shape] of tensors) {
    if (name === NGRAM_KEYS) {
      weights[name] = { shape, data: new Float64Array(bytes.slice(2 * count).buffer) };
      continue;
    }
    const data = new Float32Array(lengthOf(shape));
    const number = next(data.length);
    for (let k = 0; k < data.length; k++) data[k] = number(k);
    weights[name] = { shape, data };
  }
  const areFinite = Object.values(weights).every(({ data }) => data.every(Number.isFinite));
  if (bytes.length < 2 * count || !areFinite) throw new Error("the stored weights are damaged");
  return weights;
}
