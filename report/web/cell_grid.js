// A canvas of colored cells with a cursor.

import { isDark, palette } from "./colors.js";
import { $, el } from "./dom.js";
import { announce, showTooltip } from "./tooltip.js";

// ---- a table of coloured cells with a cursor: the map, a block's rows, the scores

export function createCellGrid(host, label) {
  const canvas = el("canvas", { tabIndex: 0, role: "application", "aria-label": label });
  const marks = ["row", "column", "cell"].map(kind =>
    el("div", { className: `mark ${kind}`, hidden: true }),
  );
  host.append(canvas, ...marks);
  let spec = null;
  let box = null;
  let at = null;
  let tipped = false; // the cell that is marked, and whether the tip tells of it

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
    const x = box.left + j * box.cell;
    const y = i * box.high;
    put(marks[0], box.left, y, spec.cols * box.cell, box.high);
    put(marks[1], x, 0, box.cell, spec.rows * box.high);
    put(marks[2], x, y, box.cell, box.high);
    return [x + box.cell, y + box.high];
  }
  function point(i, j, spoken) {
    const corner = mark(i, j);
    if (!corner) return showTooltip(null);
    const nodes = spec.tell(i, j);
    const place = canvas.getBoundingClientRect();
    tipped = true;
    showTooltip(nodes, place.left + corner[0], place.top + corner[1]);
    if (spoken) announce(nodes);
    spec.enter?.(i, j);
  }
  function leave() {
    mark(-1, -1);
    showTooltip(null);
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
    const width = Math.min(host.clientWidth, spec.most ?? 1e4);
    const context = canvas.getContext("2d");
    const ratio = devicePixelRatio || 1;
    const style = getComputedStyle(canvas);
    const family = style.fontFamily;
    context.font = `11px ${family}`;
    const measure = name => context.measureText(name).width;
    const wide = spec.rowNames ? Math.min(92, Math.max(...spec.rowNames.map(measure)) + 8) : 0;
    const fits = spec.rowNames && (width - wide) / spec.cols >= (spec.least ?? 8.5);
    const room = fits ? wide : 0;
    const left = room;
    const bottom = fits && spec.colNames ? (spec.upright ? 18 : room) : 0;
    const cell = (width - left) / spec.cols;
    const high = spec.high ?? cell;
    box = { left, cell, high };
    host.style.clipPath = `inset(0 ${host.clientWidth - width}px 0 0)`;
    const height = spec.rows * high + bottom;
    Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    context.scale(ratio, ratio);
    const small = el("canvas", { width: spec.cols, height: spec.rows });
    const image = new ImageData(spec.cols, spec.rows);
    const pixels = new Uint32Array(image.data.buffer);
    const colours = palette(spec.signed);
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
