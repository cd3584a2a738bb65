/** The events that views follow: they import this module, and need not import each other. */

/**
 * By event: head, token, pin, cell, wanted, selected, draw, stepChanged, patching, measured or
 * cellsMeasured.
 * @type {Record<string, (() => void)[]>}
 */
const listeners = {};

export function on(event, listener) {
  listeners[event] ??= [];
  listeners[event].push(listener);
}

export function emit(event) {
  for (const listener of listeners[event] ?? []) listener();
}
