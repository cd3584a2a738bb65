// What every page has: its title, its theme, the slider of the steps.

import { isDark } from "./colors.js";
import { $ } from "./dom.js";
import { formatCount, printableName } from "./format.js";

// Name the page.
export function setTitle(title, kind) {
  $("brand").textContent = kind;
  $("title").textContent = printableName(title);
  document.title = `${printableName(title)} · GlassGPT`;
}

// The theme that was chosen, kept where that is allowed; `redraw` where it or the window's size changes.
export function setUpTheme(redraw) {
  const root = document.documentElement;
  try {
    const kept = localStorage.getItem("glassgpt-theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch {
    /* storage is not allowed here */
  }
  $("theme").onclick = () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("glassgpt-theme", root.dataset.theme);
    } catch {
      /* then it is not remembered */
    }
    redraw();
  };
  matchMedia("(prefers-color-scheme: dark)").onchange = redraw;
  let waiting = 0;
  onresize = () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(redraw);
  };
}

// ---- the slider of the steps, with play: `most()` is its last place, `now()` where it stands, `go(k)` shows another

export function setUpStepSlider(most, now, go) {
  let timer = null;
  function play(on) {
    clearInterval(timer);
    timer = on
      ? setInterval(() => {
          if (now() >= most()) play(false);
          else go(now() + 1);
        }, 700)
      : null;
    $("play").textContent = on ? "❚❚" : "▶";
    $("play").setAttribute("aria-label", on ? "pause" : "play");
  }
  $("step").oninput = () => {
    play(false);
    go(Number($("step").value));
  };
  $("play").onclick = () => {
    if (timer) return play(false);
    if (now() >= most()) go(0);
    play(true);
  };
}

export function showStep(k, step) {
  $("step").value = k;
  $("step").setAttribute("aria-valuetext", `step ${formatCount(step)}`);
  $("step-now").textContent = `step ${formatCount(step)}`;
}
