/**
 * A page of explore.py reloads itself when the server has another version: another checkpoint of the
 * run, or measured scores of the heads. The address keeps what the reader has typed and selected.
 */

import { describeFailure, send } from "./engine.js";
import { reloadWhenIdle } from "./follow_run.js";

const POLL_MS = 2000;

/**
 * Show which checkpoint the page shows, and follow the server.
 *
 * @param {HTMLElement} status - Receives the state of the server.
 * @param {{version: number, isFollowing: boolean}} server - The version of this page, and whether
 *   the server loads newer checkpoints of the run.
 * @param {() => boolean} isBusy - Whether the model runs, so that the page must not reload.
 */
export function followServer(status, { version, isFollowing }, isBusy) {
  const showFollowing = () => {
    status.hidden = !isFollowing;
    status.classList.toggle("on", isFollowing);
    status.textContent = "newest checkpoint";
    status.title = "The page updates itself when the run has saved another checkpoint.";
  };

  async function poll() {
    if (document.hidden) return;
    try {
      const current = await send("version");
      showFollowing();
      if (current.version === version) return;
      clearInterval(timer);
      reloadWhenIdle(0, isBusy);
    } catch (error) {
      status.hidden = false;
      status.classList.remove("on");
      status.textContent = describeFailure(error);
      status.title = "";
    }
  }

  showFollowing();
  const timer = setInterval(poll, POLL_MS);
}
