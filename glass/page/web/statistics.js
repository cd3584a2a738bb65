/** Means, medians and standard errors over runs; null if there are too few values. */

export function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

/**
 * Median of times of an event that has not happened in all runs: in the others it is later than all
 * that are known.
 */
export function censoredMedian(times, runCount) {
  const sorted = [...times].sort((a, b) => a - b);
  const [low, high] = [sorted[(runCount - 1) >> 1], sorted[runCount >> 1]];
  return high === undefined ? null : (low + high) / 2;
}

export function standardError(values) {
  return values.length > 1 ? standardDeviation(values) / Math.sqrt(values.length) : null;
}

/** @param {number[]} values at least two */
export function standardDeviation(values) {
  const center = mean(values);
  const squares = values.reduce((sum, value) => sum + (value - center) ** 2, 0);
  return Math.sqrt(squares / (values.length - 1));
}
