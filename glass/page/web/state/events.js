/** The events that views follow: they import this module, and need not import each other. */

/** @type {Record<string, (() => void)[]>} */
const listeners = {}; // by event

export function on(event, listener) {
  listeners[event] ??= [];
  listeners[event].push(listener);
}

export function emit(event) {
  for (const listener of listeners[event] ?? []) listener();
}
