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

/**
 * Set up the slider over the steps and its play button.
 *
 * @param {() => number} lastIndex - Returns the index of the last step.
 * @param {() => number} currentIndex - Returns the index of the step that is shown.
 * @param {(index: number) => void} showIndex - Shows another step.
 */
export function setUpStepSlider(lastIndex, currentIndex, showIndex) {
  /** @type {number | null} */
  let timer = null;

  function stop() {
    clearInterval(timer);
    timer = null;
    $("play").textContent = "▶";
    $("play").setAttribute("aria-label", "play");
  }

  function play() {
    timer = setInterval(() => {
      if (currentIndex() >= lastIndex()) stop();
      else showIndex(currentIndex() + 1);
    }, PLAY_INTERVAL);
    $("play").textContent = "❚❚";
    $("play").setAttribute("aria-label", "pause");
  }

  $("step").oninput = () => {
    stop();
    showIndex(Number($("step").value));
  };
  $("play").onclick = () => {
    if (timer !== null) {
      stop();
      return;
    }
    if (currentIndex() >= lastIndex()) showIndex(0);
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
