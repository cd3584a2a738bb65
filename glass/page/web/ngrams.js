/** The n-gram embedding (variants.py). */

/** Return the place of a number in an ascending array, -1 if it is absent. */
function binarySearch(number, sorted) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < number) low = middle + 1;
    else high = middle;
  }
  return sorted[low] === number ? low : -1;
}

/**
 * Return the row of the n-gram of `length` tokens that ends at token t.
 *
 * Each length has two special rows, for n-grams that are not in the table and for those that are
 * incomplete: they begin before the text or include a hidden token.
 */
function rowOf(ids, t, length, { keys, V, specialRows }, hidden) {
  const first = t + 1 - length;
  if (first < 0 || hidden.some(j => j >= first && j < t)) return 2 * length - 3;
  let node = ids[first];
  for (let j = first + 1; j <= t && node >= 0; j++) {
    const place = binarySearch(node * V + ids[j], keys);
    node = place < 0 ? -1 : V + place;
  }
  return node < 0 ? 2 * length - 4 : specialRows + node - V;
}

/** Return what n-grams add to the embeddings of tokens from `start` on, (T - start, C). */
export function embedNgrams(weights, config, ids, start, hidden) {
  const { shape, data: table } = weights["ngrams.table"];
  const size = shape[1];
  const { n_embd: C, vocab_size: V } = config;
  const lookup = { keys: weights["ngrams.keys"].data, V, specialRows: 2 * (config.ngrams - 1) };
  const sum = new Float32Array((ids.length - start) * C);
  for (let t = start; t < ids.length; t++) {
    for (let length = 2; length <= config.ngrams; length++) {
      const row = rowOf(ids, t, length, lookup, hidden);
      for (let k = 0; k < size; k++) sum[(t - start) * C + k] += table[row * size + k];
    }
  }
  return sum;
}
