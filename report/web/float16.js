// Numbers of half the size, float16, as the page keeps them: the low bytes of all, then the high ones.

let table = null;
export function halfTable() {
  return (table ??= Float64Array.from({ length: 65536 }, (_, bits) => {
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    const size =
      exponent === 31
        ? fraction
          ? NaN
          : Infinity
        : exponent
          ? (1 + fraction / 1024) * 2 ** (exponent - 15)
          : fraction * 2 ** -24;
    return bits >> 15 ? -size : size;
  }));
}

// The model's weights by name, as forward.js takes them; the keys of n-grams stand behind as float64.
export function weightsOf(tensors, bytes) {
  const half = halfTable();
  const W = {};
  const KEYS = "ngrams.keys";
  const lengths = tensors.map(([, shape]) => shape.reduce((a, b) => a * b, 1));
  const size = lengths.reduce((sum, length, k) => sum + (tensors[k][0] === KEYS ? 0 : length), 0);
  let start = 0;
  tensors.forEach(([name, shape], k) => {
    const isKeys = name === KEYS;
    const data = isKeys
      ? new Float64Array(bytes.slice(2 * size).buffer)
      : new Float32Array(lengths[k]);
    for (let at = 0; !isKeys && at < data.length; at++)
      data[at] = half[(bytes[size + start + at] << 8) | bytes[start + at]];
    W[name] = { shape, data };
    start += isKeys ? 0 : data.length;
  });
  if (
    bytes.length < 2 * size ||
    !Object.values(W).every(({ data }) => data.every(Number.isFinite))
  ) {
    throw new Error("they are not what was written");
  }
  return W;
}
