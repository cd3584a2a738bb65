/** Means and standard errors over runs; null if there are too few values. */

export function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

/** The standard error of a mean. */
export function standardError(values) {
  if (values.length < 2) return null;
  const center = mean(values);
  const squares = values.reduce((sum, value) => sum + (value - center) ** 2, 0);
  return Math.sqrt(squares / (values.length - 1) / values.length);
}
