/** Means and standard errors over runs. */

/**
 * @param {number[]} values
 * @returns {number | null} Null if there are no values.
 */
export function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

/**
 * Sample standard deviation.
 *
 * @param {number[]} values - At least two.
 * @returns {number}
 */
export function standardDeviation(values) {
  const center = mean(values);
  const squares = values.reduce((sum, value) => sum + (value - center) ** 2, 0);
  return Math.sqrt(squares / (values.length - 1));
}

/**
 * Standard error of a mean.
 *
 * @param {number[]} values
 * @returns {number | null} Null if there are fewer than two values.
 */
export function standardError(values) {
  return values.length > 1 ? standardDeviation(values) / Math.sqrt(values.length) : null;
}
