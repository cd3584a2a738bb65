// What draws: elements, words, colours, the tip, the slider, tables of cells. Knows nothing of the run.
// Data appears as text nodes only; nothing is ever parsed as HTML.

// ---- elements, words, figures

const $ = id => document.getElementById(id);

function el(tag, properties = {}, ...children) {
  const element = tag.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key in element && !tag.startsWith("svg:")) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

const MARKS = { " ": "·", "\n": "⏎", "\u2028": "⏎", "\u2029": "⏎", "\t": "⇥", "\r": "␍", "\u007f": "␡", "\u00a0": "⍽" };

// A token with its white space, control characters and invisible marks made visible.
function visible(text) {
  const shown = c => MARKS[c] ?? (c < " " ? String.fromCodePoint(0x2400 + c.codePointAt(0)) :
    /[\u0080-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]/u.test(c) ? "�" : c);
  return [...text].map(shown).join("") || "∅";
}

function short(text, most = 14) {
  const characters = [...visible(text).replace(/([·⏎⇥])\1{2,}/g, (run, c) => `${c}×${run.length}`)];
  return characters.length > most ? characters.slice(0, most - 1).join("") + "…" : characters.join("");
}

// Text as it is, with only what would not show made visible.
function asText(text) {
  return text.replace(/[\u2028\u2029]/g, "\n").replace(/[\u0000-\u0008\u000b-\u001f]/g,
    c => String.fromCodePoint(0x2400 + c.codePointAt(0)));
}

const bdi = (text, name = "") => el("bdi", { className: name }, text);
const plain = name => name.replaceAll("_", " ");
const count = n => n.toLocaleString("en");

function figure(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  return size >= 1e5 ? count(Math.round(x)) : size < 1e-3 ? x.toExponential(2) : size >= 1000 ? count(Math.round(x))
    : x.toPrecision(4);
}

// A value with its standard error, to the digit that the error leaves: 1.39 ± 0.06.
function known(x, error) {
  if (x === null || x === undefined || !error) return figure(x);
  const digits = Math.min(20, Math.max(0, -Math.floor(Math.log10(Number(error.toPrecision(1))))));
  return `${x.toFixed(digits).replace(/^-(0\.?0*)$/, "$1")} ± ${error.toFixed(digits)}`;
}

function roundedUp(x) {
  const unit = 10 ** (Math.floor(Math.log10(x)) - 1);
  // the share above covers the rounding of the value beside it
  return Number((Math.ceil(x * 1.05 / unit) * unit).toPrecision(2));
}

function duration(seconds) {
  return seconds < 60 ? `${seconds.toPrecision(3)} s` : seconds < 3600
    ? `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s` :
    `${Math.floor(seconds / 3600)} h ${Math.round(seconds % 3600 / 60)} min`;
}

// ---- colours: a path through OKLCH with even steps of lightness, from dark indigo over red to a pale yellow

const RAMP = Array.from({ length: 256 }, (_, i) => {
  const t = i / 255, hue = (280 + 180 * t ** 0.85) * Math.PI / 180; // 280 indigo, 360 rose, 460 yellow
  for (let chroma = 0.045 + 0.155 * Math.sin(Math.PI * Math.min(1, t * 1.02)); ; chroma -= 0.004) {
    const rgb = fromOklab(0.17 + 0.8 * t, chroma * Math.cos(hue), chroma * Math.sin(hue));
    if (chroma <= 0.004 || rgb.every(c => c >= 0 && c <= 1)) {
      return rgb.map(c => Math.round(255 * Math.min(1, Math.max(0, c))));
    }
  }
});

function fromOklab(lightness, a, b) {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3,
    s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s];
  return linear.map(c => c <= 0.0031308 ? 12.92 * c : 1.055 * c ** (1 / 2.4) - 0.055);
}

const prefersDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
const isDark = () => (document.documentElement.dataset.theme ?? (prefersDark() ? "dark" : "light")) === "dark";
// square root: small weights stay visible
const level = share => Math.max(0, Math.min(255, Math.round(255 * Math.sqrt(Math.max(0, share) || 0))));
const rgb = index => RAMP[isDark() ? index : 255 - index];

function palette() { // as canvas pixels, in memory order
  const dark = isDark();
  return Uint32Array.from(RAMP, (_, i) => {
    const [r, g, b] = RAMP[dark ? i : 255 - i];
    return (255 << 24 | b << 16 | g << 8 | r) >>> 0;
  });
}

// The theme that was chosen, kept where that is allowed; `redraw` where it or the window's size changes.
function setUpTheme(redraw) {
  const root = document.documentElement;
  try {
    const kept = localStorage.getItem("glassgpt-theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch { /* storage is not allowed here */ }
  $("theme").onclick = () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("glassgpt-theme", root.dataset.theme); } catch { /* then it is not remembered */ }
    redraw();
  };
  matchMedia("(prefers-color-scheme: dark)").onchange = redraw;
  let waiting = 0;
  onresize = () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(redraw); };
}

// ---- the tip beside the pointer, and for the keyboard what is spoken

function tell(nodes, x = 0, y = 0) {
  const tip = $("tip");
  tip.hidden = !nodes;
  if (!nodes) return;
  tip.replaceChildren(...nodes);
  const { offsetWidth: w, offsetHeight: h } = tip;
  tip.style.left = `${Math.max(4, Math.min(x + 14, document.documentElement.clientWidth - w - 4))}px`;
  tip.style.top = `${y + 18 + h > innerHeight ? Math.max(4, y - h - 10) : y + 18}px`;
}

function speak(nodes) {
  $("live").replaceChildren(...nodes.map(node => node.cloneNode?.(true) ?? node));
}

// Arrow keys walk over `items`; one of them at a time is in the tab order.
function roving(container, items, columns, enter, chosen = 0) {
  items.forEach((item, k) => { item.tabIndex = k === chosen ? 0 : -1; });
  container.onkeydown = event => {
    const k = items.indexOf(event.target.closest("[tabindex]"));
    const to = { ArrowRight: k + 1, ArrowLeft: k - 1, ArrowDown: k + columns, ArrowUp: k - columns, Home: 0,
      End: items.length - 1 }[event.key];
    if (k < 0 || to === undefined || !items[to]) return;
    event.preventDefault();
    items[k].tabIndex = -1;
    items[to].tabIndex = 0;
    items[to].focus();
    enter(to);
  };
}

// ---- the slider of the steps, with play: `most()` is its last place, `now()` where it stands, `go(k)` shows another

function stepSlider(most, now, go) {
  let timer = null;
  function play(on) {
    clearInterval(timer);
    timer = on ? setInterval(() => { if (now() >= most()) play(false); else go(now() + 1); }, 700) : null;
    $("play").textContent = on ? "❚❚" : "▶";
    $("play").setAttribute("aria-label", on ? "pause" : "play");
  }
  $("step").oninput = () => { play(false); go(Number($("step").value)); };
  $("play").onclick = () => {
    if (timer) return play(false);
    if (now() >= most()) go(0);
    play(true);
  };
}

function showStep(k, step) {
  $("step").value = k;
  $("step").setAttribute("aria-valuetext", `step ${count(step)}`);
  $("step-now").textContent = `step ${count(step)}`;
}

// ---- a table of coloured cells with a cursor: the map, a block's rows, the scores

function cells(host, label) {
  const canvas = el("canvas", { tabIndex: 0, role: "application", "aria-label": label });
  const marks = ["row", "column", "cell"].map(kind => el("div", { className: `mark ${kind}`, hidden: true }));
  host.append(canvas, ...marks);
  let spec = null, box = null, at = null, tipped = false; // the cell that is marked, and whether the tip tells of it

  function mark(i, j) {
    const inside = Boolean(spec) && has(i, j);
    at = inside ? [i, j] : null;
    tipped = false;
    marks.forEach(mark => { mark.hidden = !inside; });
    if (!inside) return null;
    const put = (mark, x, y, w, h) => Object.assign(mark.style,
      { left: `${x}px`, top: `${y}px`, width: `${w}px`, height: `${h}px` });
    const x = box.left + j * box.cell, y = i * box.high;
    put(marks[0], box.left, y, spec.cols * box.cell, box.high);
    put(marks[1], x, 0, box.cell, spec.rows * box.high);
    put(marks[2], x, y, box.cell, box.high);
    return [x + box.cell, y + box.high];
  }
  function point(i, j, spoken) {
    const corner = mark(i, j);
    if (!corner) return tell(null);
    const nodes = spec.tell(i, j), place = canvas.getBoundingClientRect();
    tipped = true;
    tell(nodes, place.left + corner[0], place.top + corner[1]);
    if (spoken) speak(nodes);
    spec.enter?.(i, j);
  }
  function leave() { mark(-1, -1); tell(null); spec?.leave?.(); }
  function under(event) {
    const p = canvas.getBoundingClientRect();
    return [(event.clientY - p.top) / box.high, (event.clientX - p.left - box.left) / box.cell].map(Math.floor);
  }
  const has = (i, j) => i >= 0 && j >= 0 && i < spec.rows && j < spec.cols && spec.level(i, j) >= 0;
  canvas.onpointermove = canvas.onpointerdown = event => {
    const [i, j] = under(event);
    if (at?.[0] !== i || at?.[1] !== j || $("tip").hidden) point(i, j);
  };
  canvas.onpointerleave = canvas.onblur = leave;
  canvas.onfocus = () => { if (canvas.matches(":focus-visible")) point(...spec.start ?? [spec.rows - 1, 0], true); };
  canvas.onclick = event => { if (has(...under(event))) spec.pick?.(...under(event)); };
  canvas.onkeydown = event => {
    const [i, j] = at ?? [spec.rows - 1, 0];
    const to = { ArrowUp: [i - 1, j], ArrowDown: [i + 1, j], ArrowLeft: [i, j - 1], ArrowRight: [i, j + 1],
      Home: [i, 0] }[event.key];
    if (event.key === "Escape") return leave();
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); return at && spec.pick?.(i, j); }
    if (!to) return;
    event.preventDefault();
    if (has(...to)) point(...to, true);
  };

  const draw = wanted => {
    spec = wanted;
    const width = Math.min(host.clientWidth, spec.most ?? 1e4), context = canvas.getContext("2d");
    const ratio = devicePixelRatio || 1;
    const style = getComputedStyle(canvas), family = style.fontFamily;
    const fits = spec.rowNames && (width - 92) / spec.cols >= (spec.least ?? 8.5);
    context.font = `11px ${family}`;
    const room = fits ? Math.min(92, Math.max(...spec.rowNames.map(name => context.measureText(name).width)) + 8) : 0;
    const left = room, bottom = fits && spec.colNames ? (spec.upright ? 18 : room) : 0;
    const cell = (width - left) / spec.cols, high = spec.high ?? cell;
    box = { left, cell, high };
    host.style.clipPath = `inset(0 ${host.clientWidth - width}px 0 0)`;
    const height = spec.rows * high + bottom;
    Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    context.scale(ratio, ratio);
    const small = el("canvas", { width: spec.cols, height: spec.rows }), image = new ImageData(spec.cols, spec.rows);
    const pixels = new Uint32Array(image.data.buffer), colours = spec.signed ? signedPalette() : palette();
    for (let i = 0; i < spec.rows; i++) for (let j = 0; j < spec.cols; j++) {
      const index = spec.level(i, j);
      if (index >= 0) pixels[i * spec.cols + j] = colours[index];
    }
    small.getContext("2d").putImageData(image, 0, 0);
    context.fillStyle = getComputedStyle(host).getPropertyValue("background-color");
    context.fillRect(left, 0, width - left, spec.rows * high);
    context.imageSmoothingEnabled = cell * ratio < 1;
    context.drawImage(small, left, 0, width - left, spec.rows * high);
    context.textBaseline = "middle";
    spec.over?.(context, box);
    if (fits) {
      context.fillStyle = style.color;
      const tall = spec.colNames ? Math.min(cell, high) : high;
      context.font = `${spec.upright ? 10.5 : Math.min(11, 0.95 * tall)}px ${family}`;
      context.textAlign = "right";
      spec.rowNames.forEach((name, i) => context.fillText(name, left - 5, (i + 0.5) * high, left - 6));
      for (let j = 0; bottom && j < spec.cols; j += spec.upright ? Math.ceil(22 / cell) : 1) {
        context.save();
        context.translate(left + (j + 0.5) * cell, spec.rows * high + 5);
        if (spec.upright) context.textAlign = "center"; else context.rotate(-Math.PI / 2);
        context.fillText(spec.colNames[j], 0, spec.upright ? 6 : 0, spec.upright ? 40 : bottom - 6);
        context.restore();
      }
    }
    if (spec.write && cell >= 24) {
      context.textAlign = "center";
      context.font = `${Math.min(12, cell / 2.9)}px ${family}`;
      for (let i = 0; i < spec.rows; i++) for (let j = 0; j < spec.cols; j++) {
        const index = spec.level(i, j);
        if (index < 0) continue;
        const pale = spec.signed ? (Math.abs(index - 128) > 90) === isDark() : (isDark() ? index : 255 - index) > 140;
        context.fillStyle = pale ? "#16121f" : "#fff";
        context.fillText(spec.write(i, j), left + (j + 0.5) * cell, (i + 0.5) * high);
      }
    }
    if (at && tipped && !$("tip").hidden) point(...at);
    else if (at) mark(...at);
  };
  return Object.assign(draw, { mark });
}
