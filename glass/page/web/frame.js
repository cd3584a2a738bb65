/** What all pages have: the title and the theme; and the slider over the steps of a run. */

import { isDark } from "./colors.js";
import { $ } from "./dom.js";
import { formatCount, printableName } from "./format.js";

const THEME_KEY = "glassgpt-theme";
/** Milliseconds between two steps while the slider plays. */
const PLAY_INTERVAL = 700;

/**
 * Name the page.
 *
 * @param {string} title
 * @param {string} kind - What the page is about, before the title.
 */
export function setTitle(title, kind) {
  $("brand").textContent = kind;
  $("title").textContent = printableName(title);
  document.title = `${printableName(title)} · GlassGPT`;
}

/** Use the theme that the reader chose before, if the browser allows the page to remember it. */
function restoreTheme() {
  try {
    const theme = localStorage.getItem(THEME_KEY);
    if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  } catch {
    // The browser does not allow storage for pages from files.
  }
}

/** Change between the light and the dark theme. */
function toggleTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem(THEME_KEY, theme);
  } catch {
    // The theme holds until the page is closed.
  }
}

/**
 * Set up the button that changes the theme.
 *
 * @param {() => void} redraw - Called when the theme or the size of the window has changed.
 */
export function setUpTheme(redraw) {
  restoreTheme();
  $("theme").onclick = () => {
    toggleTheme();
    redraw();
  };
  matchMedia("(prefers-color-scheme: dark)").onchange = redraw;
  let request = 0;
  window.onresize = () => {
    cancelAnimationFrame(request);
    request = requestAnimationFrame(redraw);
  };
}

/** Directions of the keys that move the slider to the next place where it stops. */
const DIRECTIONS = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 };

/**
 * Set up the slider over the steps and its play button. The slider shows the step on display; a step
 * that was chosen is shown there when it has been loaded.
 *
 * @param {object} steps
 * @param {() => number[]} steps.stops - Returns the indices at which the slider stops, ascending.
 * @param {() => number} steps.shown - Returns the index of the step on display.
 * @param {() => number} steps.wanted - Returns the index of the step that was chosen last.
 * @param {(index: number) => void} steps.choose - Chooses the stop nearest to an index.
 */
export function setUpStepSlider({ stops, shown, wanted, choose }) {
  /** @type {number | null} */
  let timer = null;

  function stop() {
    clearInterval(timer);
    timer = null;
    $("play").textContent = "▶";
    $("play").setAttribute("aria-label", "play");
  }

  /** Return the stop after an index, or before it; undefined at the end. */
  const nextStop = (index, direction) =>
    direction > 0 ? stops().find(k => k > index) : stops().findLast(k => k < index);

  function play() {
    timer = setInterval(() => {
      if (wanted() !== shown()) return; // it is being loaded
      const next = nextStop(shown(), 1);
      if (next === undefined) stop();
      else choose(next);
    }, PLAY_INTERVAL);
    $("play").textContent = "❚❚";
    $("play").setAttribute("aria-label", "pause");
  }

  $("step").oninput = () => {
    const index = Number($("step").value);
    stop();
    $("step").value = shown();
    choose(index);
  };
  $("step").onkeydown = event => {
    const direction = DIRECTIONS[event.key];
    if (!direction) return;
    event.preventDefault();
    stop();
    choose(nextStop(wanted(), direction) ?? wanted());
  };
  $("play").onclick = () => {
    if (timer !== null) {
      stop();
      return;
    }
    if (nextStop(shown(), 1) === undefined) choose(stops()[0]);
    play();
  };
}

/**
 * Show a step on the slider.
 *
 * @param {number} index
 * @param {number} step
 */
export function showStep(index, step) {
  $("step").value = index;
  $("step").setAttribute("aria-valuetext", `step ${formatCount(step)}`);
  $("step-now").textContent = `step ${formatCount(step)}`;
}
