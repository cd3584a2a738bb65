/**
 * A page of a run in progress replaces itself by the newer page that training wrote in its place.
 *
 * A page opened from disk may not read files and has no server that could notify it, so it reloads
 * itself while it is visible and nobody uses it. The address keeps the selection, the history the
 * scroll position.
 */

import { formatCount } from "../base/format.js";

const MIN_RELOAD_MS = 3000;
const MAX_RELOAD_MS = 120_000;
const IDLE_MS = 3000; // time without input before a reload
const CHECK_MS = 500;
const INPUT_EVENTS = ["pointermove", "pointerdown", "keydown", "wheel", "touchmove", "input"];

/**
 * Show how far the run has come, and follow it unless it is finished or was abandoned.
 *
 * @param {HTMLElement} status
 * @param {{step: number | null, maxSteps: number, seconds: number}} run - `seconds` is its duration so far.
 * @param {() => boolean} isBusy - Whether the page must not reload.
 */
export function followRun(status, { step, maxSteps, seconds }, isBusy) {
  const age = Date.now() - Date.parse(document.lastModified);
  const isFinished = !(maxSteps > step);
  // Training writes a page at the latest when its steps have doubled; an older page was abandoned.
  const isFresh = age < 1000 * (600 + 3 * seconds);
  const isFromDisk = location.protocol === "file:";
  status.hidden = !isFinished && !isFromDisk;
  if (isFinished) {
    status.textContent = "finished";
    status.title = "Training has ended.";
    return;
  }
  // Nobody tells the page that training was stopped, so it says only how far the run has come.
  status.textContent = `step ${formatCount(step ?? 0)} of ${formatCount(maxSteps)}`;
  if (isFromDisk && isFresh) {
    status.title = "This page updates itself while training goes on.";
    reloadWhenIdle(Math.min(MAX_RELOAD_MS, Math.max(MIN_RELOAD_MS, age / 10)), isBusy);
  } else {
    status.title = `Training has not updated this page since ${document.lastModified}.`;
  }
}

/**
 * Reload the page as soon as nobody uses it.
 *
 * @param {number} delay - At least, in milliseconds.
 * @param {() => boolean} isBusy
 */
export function reloadWhenIdle(delay, isBusy) {
  const due = performance.now() + delay;
  let lastInput = performance.now();
  const noteInput = () => {
    lastInput = performance.now();
  };
  for (const event of INPUT_EVENTS) {
    addEventListener(event, noteInput, { capture: true, passive: true });
  }
  setInterval(() => {
    const now = performance.now();
    const isUsed = now < lastInput + IDLE_MS || document.hidden || isBusy();
    if (now >= due && !isUsed) reloadPage();
  }, CHECK_MS);
}

export function reloadPage() {
  history.scrollRestoration = "manual";
  history.replaceState({ scroll: [scrollX, scrollY] }, "");
  location.reload();
}

/** Scroll to where the page was before it reloaded; call this once everything is drawn. */
export function restoreScroll() {
  const [x, y] = history.state?.scroll ?? [];
  if (Number.isFinite(x) && Number.isFinite(y)) scrollTo(x, y);
  history.scrollRestoration = "auto";
}
