/** What all pages have: the title and the theme. */

import { $ } from "./base/dom.js";
import { printableName } from "./base/format.js";
import { isDark } from "./charts/colors.js";

const THEME_KEY = "glassgpt-theme";

/** Name the page, and what it is about before its title. */
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

function toggleTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem(THEME_KEY, theme);
  } catch {
    // The theme holds until the page is closed.
  }
}

/** Set up the button that changes the theme, and redraw when that or the window's size changes. */
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
