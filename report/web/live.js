const SOON = 3000;
const LATE = 120_000;
const IDLE = 3000; // ms: between two looks, at least and most; without a key or pointer
const USES = ["pointermove", "pointerdown", "keydown", "wheel", "touchmove", "input"];

// Say in `dot` whether the run goes on, and follow it where it does. seconds: how long it took so far;
// playing(): whether the page moves by itself.
export function follow(dot, { step, maxSteps, seconds }, playing) {
  const age = Date.now() - Date.parse(document.lastModified);
  const ended = !(maxSteps > step);
  // A page comes at each doubling of the steps at the latest: one that is far older was left by a run that stopped.
  const live = !ended && location.protocol === "file:" && age < 1000 * (600 + 3 * seconds);
  dot.hidden = !ended && !live && location.protocol !== "file:";
  dot.textContent = live ? "running" : ended ? "finished" : "unfinished";
  dot.title = live
    ? "The run goes on; a newer page is taken over by itself."
    : ended
      ? "The run has ended."
      : `No newer page has come since ${document.lastModified}.`;
  dot.classList.toggle("on", live);
  if (!live) return;
  const due = performance.now() + Math.min(LATE, Math.max(SOON, age / 10));
  let used = performance.now();
  for (const kind of USES)
    addEventListener(
      kind,
      () => {
        used = performance.now();
      },
      { capture: true, passive: true },
    );
  setInterval(() => {
    const now = performance.now();
    if (now < due || now < used + IDLE || document.hidden || playing()) return;
    history.scrollRestoration = "manual";
    history.replaceState({ scroll: [scrollX, scrollY] }, "");
    location.reload();
  }, 500);
}

// Once all is drawn: as far down as before the page was taken over.
export function scrollAsBefore() {
  const [x, y] = history.state?.scroll ?? [];
  if (Number.isFinite(x) && Number.isFinite(y)) scrollTo(x, y);
  history.scrollRestoration = "auto";
}
