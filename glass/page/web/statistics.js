/** Means and standard errors over runs. */

/**
 * @param {number[]} values
 * @returns {number | null} Null if there are no values.
 */
export function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

/**
 * Median of times of an event that has not happened in all runs: in the others it is later than all
 * that are known.
 *
 * @param {number[]} times - Of the runs in which it has happened.
 * @param {number} runCount
 * @returns {number | null} Null if the median is not among the known times.
 */
export function censoredMedian(times, runCount) {
  const sorted = [...times].sort((a, b) => a - b);
  const [low, high] = [sorted[(runCount - 1) >> 1], sorted[runCount >> 1]];
  return high === undefined ? null : (low + high) / 2;
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
