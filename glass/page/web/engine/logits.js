/** Logits to probabilities. */

export const PREDICTED_TOKENS = 5; // likeliest next tokens of each token

/** Return log Σ exp of each row of logits (n, V). */
export function logNormalizers(logits, V) {
  return Float64Array.from({ length: logits.length / V }, (_, t) => {
    const row = logits.subarray(t * V, (t + 1) * V);
    const largest = row.reduce((a, b) => Math.max(a, b), -Infinity);
    return largest + Math.log(row.reduce((sum, z) => sum + Math.exp(z - largest), 0));
  });
}

/** Return the indices of the n largest numbers, the largest first; of equal ones the first. */
export function argTop(numbers, n) {
  const top = [];
  for (let k = 0; k < numbers.length; k++) {
    if (top.length === n && numbers[k] <= numbers[top[n - 1]]) continue;
    let rank = top.length;
    while (rank > 0 && numbers[top[rank - 1]] < numbers[k]) rank--;
    top.splice(rank, 0, k);
    if (top.length > n) top.pop();
  }
  return top;
}
