/**
 * A page of a run in progress replaces itself by the newer page that training wrote in its place.
 *
 * A page opened from disk may read no other file, but it may load a script: the one beside it says
 * at which step the newest page was written. The page reloads itself for a newer one while it is
 * visible and nobody uses it. The address keeps the selection, the history the scroll position.
 */

import { el } from "../base/dom.js";
import { formatCount } from "../base/format.js";

const ASK_MS = 1000;
const IDLE_MS = 3000; // time without input before a reload
const CHECK_MS = 500;
const INPUT_EVENTS = ["pointermove", "pointerdown", "keydown", "wheel", "touchmove", "input"];

/**
 * Show how far the run has come, and follow it unless it is finished.
 *
 * @param {HTMLElement} status
 * @param {{step: number, maxSteps: number}} run
 * @param {() => boolean} isBusy - Whether the page must not reload.
 */
export function followRun(status, { step, maxSteps }, isBusy) {
  if (step >= maxSteps) {
    status.hidden = false;
    status.textContent = "finished";
    status.title = "Training has ended.";
  } else if (location.protocol === "file:") {
    // Nobody tells the page that training was stopped, so it says only how far the run has come.
    status.hidden = false;
    status.textContent = `step ${formatCount(step)} of ${formatCount(maxSteps)}`;
    status.title = `Written on ${document.lastModified}; updates itself while training goes on.`;
    reloadWhenNewer(step, isBusy);
  }
}

/** Reload the page for that of a later step; without the script, as in a copy, it stays. */
function reloadWhenNewer(step, isBusy) {
  const script = el("script", { src: `${location.pathname}.js?${Date.now()}` });
  script.onload = () => {
    script.remove();
    if (Number(script.dataset.step) > step) reloadWhenIdle(isBusy);
    else setTimeout(reloadWhenNewer, ASK_MS, step, isBusy);
  };
  document.head.append(script);
}

/**
 * Reload the page as soon as nobody uses it.
 *
 * @param {() => boolean} isBusy
 */
export function reloadWhenIdle(isBusy) {
  let lastInput = performance.now();
  const noteInput = () => {
    lastInput = performance.now();
  };
  for (const event of INPUT_EVENTS) {
    addEventListener(event, noteInput, { capture: true, passive: true });
  }
  setInterval(() => {
    const isUsed = performance.now() < lastInput + IDLE_MS || document.hidden || isBusy();
    if (!isUsed) reloadPage();
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
