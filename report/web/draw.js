// What draws: elements, words, colours, the tip, the slider, tables of cells. Knows nothing of the run.
// Data appears as text nodes only; nothing is ever parsed as HTML.

// ---- elements, words, figures

export const $ = id => document.getElementById(id);

export function el(tag, properties = {}, ...children) {
  const element = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key in element && !tag.startsWith("svg:")) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

const MARKS = {
  " ": "·",
  "\n": "⏎",
  "\u2028": "⏎",
  "\u2029": "⏎",
  "\t": "⇥",
  "\r": "␍",
  "\u007f": "␡",
  "\u00a0": "⍽",
};

// A token with its white space, control characters and invisible marks made visible.
export function visible(text) {
  const shown = c =>
    MARKS[c] ??
    (c < " "
      ? String.fromCodePoint(0x2400 + c.codePointAt(0))
      : /[\u0080-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]/u.test(c)
        ? "�"
        : c);
  return [...text].map(shown).join("") || "∅";
}

export function short(text, most = 14) {
  const characters = [...visible(text).replace(/([·⏎⇥])\1{2,}/g, (run, c) => `${c}×${run.length}`)];
  return characters.length > most
    ? characters.slice(0, most - 1).join("") + "…"
    : characters.join("");
}

// Text as it is, with only what would not show made visible.
export function asText(text) {
  return text
    .replace(/[\u2028\u2029]/g, "\n")
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, c => String.fromCodePoint(0x2400 + c.codePointAt(0)));
}

export const bdi = (text, name = "") => el("bdi", { className: name }, text);
export const plain = name => name.replaceAll("_", " ");
export const count = n => n.toLocaleString("en");
export const some = (n, name) => `${count(n)} ${name}${n === 1 ? "" : "s"}`;
export const words = text => visible(text).replaceAll("·", " ").replace("∅", "(none)"); // a name, not a token

export function figure(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  return size >= 1e5
    ? count(Math.round(x))
    : size < 1e-3
      ? x.toExponential(2)
      : size >= 1000
        ? count(Math.round(x))
        : x.toPrecision(4);
}

// A value with its standard error, to the digit that the error leaves: 1.39 ± 0.06.
export function known(x, error) {
  if (x === null || x === undefined || !error) return figure(x);
  const digits = Math.min(20, Math.max(0, -Math.floor(Math.log10(Number(error.toPrecision(1))))));
  return `${x.toFixed(digits).replace(/^-(0\.?0*)$/, "$1")} ± ${error.toFixed(digits)}`;
}

export function roundedUp(x) {
  const unit = 10 ** (Math.floor(Math.log10(x)) - 1);
  // the share above covers the rounding of the value beside it
  return Number((Math.ceil((x * 1.05) / unit) * unit).toPrecision(2));
}

export function duration(seconds) {
  return seconds < 60
    ? `${seconds.toPrecision(3)} s`
    : seconds < 3600
      ? `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`
      : `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

// ---- colours: a path with even steps of lightness, from dark indigo over red to a pale yellow

const STOPS = [
  [12, 12, 34],
  [41, 16, 65],
  [78, 15, 87],
  [120, 6, 96],
  [161, 2, 91],
  [196, 28, 77],
  [224, 64, 57],
  [241, 104, 40],
  [247, 145, 56],
  [247, 185, 104],
  [245, 218, 160],
  [252, 247, 212],
];
export const RAMP = Array.from({ length: 256 }, (_, i) => {
  const at = (i / 255) * (STOPS.length - 1),
    k = Math.min(STOPS.length - 2, Math.floor(at));
  return STOPS[k].map((c, n) => Math.round(c + (at - k) * (STOPS[k + 1][n] - c)));
});

const prefersDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
export const isDark = () =>
  (document.documentElement.dataset.theme ?? (prefersDark() ? "dark" : "light")) === "dark";
// The place of a share among the 256 colours, by its square root, so that what is small stays visible; of a signed
// scale 128 is nothing, and what is not known.
export function level(share, signed = false) {
  const root = Math.sqrt(Math.abs(share) || 0);
  if (signed) return 128 + (Math.sign(share) || 0) * Math.min(127, Math.round(127 * root));
  return share > 0 ? Math.min(255, Math.round(255 * root)) : 0;
}

// A colour as [red, green, blue]; of a signed scale red is above nothing, blue below.
function shade(index, signed = false) {
  if (!signed) return RAMP[isDark() ? index : 255 - index];
  const [below, nothing, above] = isDark()
    ? [
        [70, 160, 255],
        [32, 32, 39],
        [255, 92, 120],
      ]
    : [
        [20, 100, 190],
        [250, 249, 247],
        [179, 18, 63],
      ];
  const t = (index - 128) / 127,
    end = t < 0 ? below : above;
  return nothing.map((c, k) => Math.round(c + Math.min(1, Math.abs(t)) * (end[k] - c)));
}

export function palette(signed = false) {
  // as canvas pixels, in memory order
  return Uint32Array.from({ length: 256 }, (_, i) => {
    const [r, g, b] = shade(i, signed);
    return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  });
}

// The colours of a scale that ends at `most`, with figures.
export function colourBar(host, name, most, signed = false) {
  const ramp = el("canvas", { className: "ramp", width: 255, height: 1, "aria-hidden": "true" });
  const context = ramp.getContext("2d");
  for (let i = 1; i < 256; i++) {
    context.fillStyle = `rgb(${shade(i, signed)})`;
    context.fillRect(i - 1, 0, 1, 1);
  }
  const stops = signed ? [-1, -0.25, 0, 0.25, 1] : [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1];
  const text = m =>
    signed && m
      ? signedText(m * most)
      : most === 1
        ? String(m).replace("0.", ".")
        : String(Number((m * most).toPrecision(2)));
  const left = m => (signed ? 50 + 50 * Math.sign(m) * Math.sqrt(Math.abs(m)) : 100 * Math.sqrt(m));
  const tick = m =>
    el(
      "span",
      { style: `left: ${left(m)}%; translate: ${-50 - (signed ? 50 * Math.trunc(m) : 0)}%` },
      text(m),
    );
  host.replaceChildren(
    el("span", {}, name),
    ramp,
    el("div", { className: "ticks" }, ...stops.map(tick)),
  );
}

export const signedText = x =>
  Number.isFinite(x) ? `${x > 0 ? "+" : x < 0 ? "−" : ""}${Math.abs(x).toFixed(2)}` : "–";

// Name the page.
export function entitle(title, kind) {
  $("brand").textContent = kind;
  $("title").textContent = words(title);
  document.title = `${words(title)} · GlassGPT`;
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

// ---- the tip beside the pointer, and for the keyboard what is spoken

export function tell(nodes, x = 0, y = 0) {
  const tip = $("tip");
  tip.hidden = !nodes;
  if (!nodes) return;
  tip.replaceChildren(...nodes);
  const { offsetWidth: w, offsetHeight: h } = tip;
  tip.style.left = `${Math.max(4, Math.min(x + 14, document.documentElement.clientWidth - w - 4))}px`;
  tip.style.top = `${y + 18 + h > innerHeight ? Math.max(4, y - h - 10) : y + 18}px`;
}

export function speak(nodes) {
  $("live").replaceChildren(...nodes.map(node => node.cloneNode?.(true) ?? node));
}

// What a mark tells when it is pointed at or focused; `pick` is done at a click, Enter or the space bar, `near` hears
// whether it is told of.
export function telling(mark, nodes, pick = null, near = () => {}) {
  mark.onpointerenter = mark.onfocus = event => {
    const place = mark.getBoundingClientRect(),
      told = nodes();
    tell(told, place.right, place.bottom - 12);
    if (event.type === "focus") speak(told);
    near(true);
  };
  mark.onpointerleave = mark.onblur = () => {
    tell(null);
    near(false);
  };
  mark.onclick = pick;
  mark.onkeydown = event => {
    if (pick && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      pick();
    }
  };
  return mark;
}

// Words that the page has with an explanation, data-says: told under the pointer, and of a choice when the keyboard is
// there.
export function explainWords() {
  for (const word of document.querySelectorAll("[data-says]")) {
    const input = word.closest("label")?.querySelector("input");
    word.classList.add("term");
    telling(word, () => [el("div", {}, word.dataset.says)]);
    if (!input) {
      word.tabIndex = 0;
      continue;
    }
    input.onfocus = event => {
      if (input.matches(":focus-visible")) word.onfocus(event);
    };
    input.onblur = word.onblur;
  }
}

// Arrow keys walk over `items`; one of them at a time is in the tab order.
export function roving(container, items, columns, enter, chosen = 0) {
  items.forEach((item, k) => {
    item.tabIndex = k === chosen ? 0 : -1;
  });
  container.onkeydown = event => {
    const k = items.indexOf(event.target.closest("[tabindex]"));
    const to = {
      ArrowRight: k + 1,
      ArrowLeft: k - 1,
      ArrowDown: k + columns,
      ArrowUp: k - columns,
      Home: 0,
      End: items.length - 1,
    }[event.key];
    if (k < 0 || to === undefined || !items[to]) return;
    event.preventDefault();
    items[k].tabIndex = -1;
    items[to].tabIndex = 0;
    items[to].focus();
    enter(to);
  };
}

// ---- the slider of the steps, with play: `most()` is its last place, `now()` where it stands, `go(k)` shows another

export function stepSlider(most, now, go) {
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
  $("step").setAttribute("aria-valuetext", `step ${count(step)}`);
  $("step-now").textContent = `step ${count(step)}`;
}

// ---- a table of coloured cells with a cursor: the map, a block's rows, the scores

export function cells(host, label) {
  const canvas = el("canvas", { tabIndex: 0, role: "application", "aria-label": label });
  const marks = ["row", "column", "cell"].map(kind =>
    el("div", { className: `mark ${kind}`, hidden: true }),
  );
  host.append(canvas, ...marks);
  let spec = null,
    box = null,
    at = null,
    tipped = false; // the cell that is marked, and whether the tip tells of it

  function mark(i, j) {
    const inside = Boolean(spec) && has(i, j);
    at = inside ? [i, j] : null;
    tipped = false;
    marks.forEach(mark => {
      mark.hidden = !inside;
    });
    if (!inside) return null;
    const put = (mark, x, y, w, h) =>
      Object.assign(mark.style, {
        left: `${x}px`,
        top: `${y}px`,
        width: `${w}px`,
        height: `${h}px`,
      });
    const x = box.left + j * box.cell,
      y = i * box.high;
    put(marks[0], box.left, y, spec.cols * box.cell, box.high);
    put(marks[1], x, 0, box.cell, spec.rows * box.high);
    put(marks[2], x, y, box.cell, box.high);
    return [x + box.cell, y + box.high];
  }
  function point(i, j, spoken) {
    const corner = mark(i, j);
    if (!corner) return tell(null);
    const nodes = spec.tell(i, j),
      place = canvas.getBoundingClientRect();
    tipped = true;
    tell(nodes, place.left + corner[0], place.top + corner[1]);
    if (spoken) speak(nodes);
    spec.enter?.(i, j);
  }
  function leave() {
    mark(-1, -1);
    tell(null);
    spec?.leave?.();
  }
  function under(event) {
    const p = canvas.getBoundingClientRect();
    return [(event.clientY - p.top) / box.high, (event.clientX - p.left - box.left) / box.cell].map(
      Math.floor,
    );
  }
  const has = (i, j) => i >= 0 && j >= 0 && i < spec.rows && j < spec.cols && spec.level(i, j) >= 0;
  canvas.onpointermove = canvas.onpointerdown = event => {
    const [i, j] = under(event);
    if (at?.[0] !== i || at?.[1] !== j || $("tip").hidden) point(i, j);
  };
  canvas.onpointerleave = canvas.onblur = leave;
  canvas.onfocus = () => {
    if (canvas.matches(":focus-visible")) point(...(spec.start ?? [spec.rows - 1, 0]), true);
  };
  canvas.onclick = event => {
    if (has(...under(event))) spec.pick?.(...under(event));
  };
  canvas.onkeydown = event => {
    const [i, j] = at ?? [spec.rows - 1, 0];
    const to = {
      ArrowUp: [i - 1, j],
      ArrowDown: [i + 1, j],
      ArrowLeft: [i, j - 1],
      ArrowRight: [i, j + 1],
      Home: [i, 0],
    }[event.key];
    if (event.key === "Escape") return leave();
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      return at && spec.pick?.(i, j);
    }
    if (!to) return;
    event.preventDefault();
    if (has(...to)) point(...to, true);
  };

  const draw = wanted => {
    spec = wanted;
    const width = Math.min(host.clientWidth, spec.most ?? 1e4),
      context = canvas.getContext("2d");
    const ratio = devicePixelRatio || 1;
    const style = getComputedStyle(canvas),
      family = style.fontFamily;
    context.font = `11px ${family}`;
    const measure = name => context.measureText(name).width;
    const wide = spec.rowNames ? Math.min(92, Math.max(...spec.rowNames.map(measure)) + 8) : 0;
    const fits = spec.rowNames && (width - wide) / spec.cols >= (spec.least ?? 8.5),
      room = fits ? wide : 0;
    const left = room,
      bottom = fits && spec.colNames ? (spec.upright ? 18 : room) : 0;
    const cell = (width - left) / spec.cols,
      high = spec.high ?? cell;
    box = { left, cell, high };
    host.style.clipPath = `inset(0 ${host.clientWidth - width}px 0 0)`;
    const height = spec.rows * high + bottom;
    Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    context.scale(ratio, ratio);
    const small = el("canvas", { width: spec.cols, height: spec.rows }),
      image = new ImageData(spec.cols, spec.rows);
    const pixels = new Uint32Array(image.data.buffer),
      colours = palette(spec.signed);
    for (let i = 0; i < spec.rows; i++)
      for (let j = 0; j < spec.cols; j++) {
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
      const each = spec.upright ? Math.ceil(11 / high) : 1; // names do not overlap
      spec.rowNames.forEach(
        (name, i) => i % each || context.fillText(name, left - 5, (i + 0.5) * high, left - 6),
      );
      for (let j = 0; bottom && j < spec.cols; j += spec.upright ? Math.ceil(22 / cell) : 1) {
        context.save();
        context.translate(left + (j + 0.5) * cell, spec.rows * high + 5);
        if (spec.upright) context.textAlign = "center";
        else context.rotate(-Math.PI / 2);
        context.fillText(spec.colNames[j], 0, spec.upright ? 6 : 0, spec.upright ? 40 : bottom - 6);
        context.restore();
      }
    }
    if (spec.write && cell >= 24 && high >= 12) {
      context.textAlign = "center";
      context.font = `${Math.min(12, cell / 2.9)}px ${family}`;
      for (let i = 0; i < spec.rows; i++)
        for (let j = 0; j < spec.cols; j++) {
          const index = spec.level(i, j);
          if (index < 0) continue;
          const pale = spec.signed
            ? Math.abs(index - 128) > 90 === isDark()
            : (isDark() ? index : 255 - index) > 140;
          context.fillStyle = pale ? "#16121f" : "#fff";
          context.fillText(spec.write(i, j), left + (j + 0.5) * cell, (i + 0.5) * high);
        }
    }
    if (at && tipped && !$("tip").hidden) point(...at);
    else if (at) mark(...at);
  };
  return Object.assign(draw, { mark });
}

// ---- tokens and heads

export const headName = (layer, head) => `L${layer}H${head}`;

// A token with its place
export const place = (view, i) => [bdi(short(view.tokens[i]), "token"), el("small", {}, ` ${i}`)];

export const DEEP = 10; // layers, from which a page is laid out for many

// The cells of layers × heads, at most so tall in all.
export function headCells(L, H, tall) {
  return {
    rows: L,
    cols: H,
    start: [0, 0],
    least: 0,
    upright: true,
    most: 64 * H + 26,
    high: Math.min(46, Math.max(L > DEEP ? 9 : 14, tall / Math.max(L, H))),
    rowNames: Array.from({ length: L }, (_, l) => `L${l}`),
    colNames: Array.from({ length: H }, (_, h) => `H${h}`),
  };
}
