/** A table of colored cells on a canvas, with a cursor for pointer and keyboard. */

import { $, el } from "../base/dom.js";
import { announce, showTooltip } from "../base/tooltip.js";
import { inkOn, palette } from "./colors.js";

/** Pixels of a cell from which its value is written in it. */
const MIN_WRITTEN_WIDTH = 24;
const MIN_WRITTEN_HEIGHT = 15;
const MIN_NAMED_WIDTH = 8.5; // pixels of a cell from which rows and columns have names
const MAX_NAME_WIDTH = 92;
const UPRIGHT_NAME_HEIGHT = 18; // pixels below the cells for names that are not turned
/** Rows down and columns to the right that an arrow key moves the cursor. */
const ARROW_KEYS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

const NO_CONTENT = { rows: 0, cols: 0, color: () => -1, describe: () => [] };

export class CellGrid {
  /** Add an empty grid to an element; `label` is its name for screen readers. */
  constructor(host, label) {
    this.host = host;
    this.canvas = el("canvas", { tabIndex: 0, role: "application", "aria-label": label });
    this.marks = ["row", "column", "cell"].map(name =>
      el("div", { className: `mark ${name}`, hidden: true }),
    );
    /** @type {GridContent} */
    this.content = NO_CONTENT;
    this.box = null; // where the cells are on the canvas
    this.marked = null; // [row, column] of the cursor
    host.append(this.canvas, ...this.marks);
    this.#listen();
  }

  /** @param {GridContent} content */
  draw(content) {
    this.content = content;
    this.box = measureCells(this.host, this.canvas, content);
    drawCanvas(this.host, this.canvas, content, this.box);
    if (!this.marked) return;
    if ($("tip").hidden) this.#mark(...this.marked);
    else this.#pointAt(...this.marked);
  }

  #listen() {
    const { canvas } = this;
    const point = event => {
      const [i, j] = this.#cellUnder(event);
      const isMarked = this.marked?.[0] === i && this.marked[1] === j;
      if (!isMarked || $("tip").hidden) this.#pointAt(i, j);
    };
    const leave = () => this.#leave();
    canvas.onpointermove = point;
    canvas.onpointerdown = point;
    canvas.onpointerleave = leave;
    canvas.onblur = leave;
    canvas.onfocus = () => {
      const [i, j] = this.content.start ?? [this.content.rows - 1, 0];
      if (canvas.matches(":focus-visible")) this.#pointAt(i, j, true);
    };
    canvas.onclick = event => {
      const [i, j] = this.#cellUnder(event);
      if (this.#hasCell(i, j)) this.content.pick?.(i, j);
    };
    canvas.onkeydown = event => this.#onKey(event);
  }

  #onKey(event) {
    const [i, j] = this.marked ?? [this.content.rows - 1, 0];
    const isPick = event.key === "Enter" || event.key === " ";
    let target = null;
    if (event.key === "Escape") this.#leave();
    else if (event.key === "Home") target = this.#nextCell(i, -1, 0, 1);
    else if (event.key in ARROW_KEYS) target = this.#nextCell(i, j, ...ARROW_KEYS[event.key]);
    else if (isPick && this.marked) this.content.pick?.(i, j);
    if (isPick || event.key === "Home" || event.key in ARROW_KEYS) event.preventDefault();
    if (target) this.#pointAt(...target, true);
  }

  #hasCell(i, j) {
    const { rows, cols, color } = this.content;
    return i >= 0 && j >= 0 && i < rows && j < cols && color(i, j) >= 0;
  }

  /** Return the next cell in a direction, beyond places without a cell; null if there is none. */
  #nextCell(i, j, down, right) {
    const size = Math.max(this.content.rows, this.content.cols);
    for (let n = 1; n <= size; n++) {
      if (this.#hasCell(i + n * down, j + n * right)) return [i + n * down, j + n * right];
    }
    return null;
  }

  #cellUnder({ clientX, clientY }) {
    const corner = this.canvas.getBoundingClientRect();
    const { left, cellWidth, cellHeight } = this.box;
    const row = (clientY - corner.top) / cellHeight;
    const column = (clientX - corner.left - left) / cellWidth;
    return [Math.floor(row), Math.floor(column)];
  }

  /** Mark a cell, its row and its column; none if there is no such cell. */
  #mark(i, j) {
    this.marked = this.#hasCell(i, j) ? [i, j] : null;
    for (const mark of this.marks) mark.hidden = !this.marked;
    if (!this.marked) return;
    const { left, cellWidth, cellHeight } = this.box;
    const x = left + j * cellWidth;
    const y = i * cellHeight;
    const [row, column, cell] = this.marks;
    setBox(row, left, y, this.content.cols * cellWidth, cellHeight);
    setBox(column, x, 0, cellWidth, this.content.rows * cellHeight);
    setBox(cell, x, y, cellWidth, cellHeight);
  }

  /** Move the cursor to a cell and show its tooltip. */
  #pointAt(i, j, isAnnounced = false) {
    this.#mark(i, j);
    if (!this.marked) {
      showTooltip(null);
      return;
    }
    const nodes = this.content.describe(i, j);
    const corner = this.canvas.getBoundingClientRect();
    const { left, cellWidth, cellHeight } = this.box;
    const x = corner.left + left + (j + 1) * cellWidth;
    showTooltip(nodes, x, corner.top + (i + 1) * cellHeight);
    if (isAnnounced) announce(nodes);
    this.content.enter?.(i, j);
  }

  #leave() {
    this.#mark(-1, -1);
    showTooltip(null);
    this.content.leave?.();
  }
}

function setBox(element, x, y, width, height) {
  const pixels = { left: x, top: y, width, height };
  for (const [name, value] of Object.entries(pixels)) element.style[name] = `${value}px`;
}

/** Fit cells into their host; `bottom` is the height of the names of the columns. */
function measureCells(host, canvas, content) {
  const { rows, cols, rowNames = [], colNames = [] } = content;
  const width = Math.min(host.clientWidth, content.maxWidth ?? Infinity);
  const context = canvas.getContext("2d");
  context.font = `11px ${getComputedStyle(canvas).fontFamily}`;
  const widthOf = names => {
    const widths = names.map(name => context.measureText(name).width);
    return Math.min(MAX_NAME_WIDTH, Math.max(...widths) + 8);
  };
  const nameWidth = widthOf(rowNames);
  const minNamedWidth = content.minNamedWidth ?? MIN_NAMED_WIDTH;
  const hasNames = rowNames.length > 0 && (width - nameWidth) / cols >= minNamedWidth;
  const left = hasNames ? nameWidth : 0;
  const columnNameHeight = content.upright ? UPRIGHT_NAME_HEIGHT : widthOf(colNames);
  const bottom = hasNames && colNames.length ? columnNameHeight : 0;
  const cellWidth = (width - left) / cols;
  const cellHeight = content.cellHeight ?? cellWidth;
  return {
    left,
    cellWidth,
    cellHeight,
    width,
    height: rows * cellHeight + bottom,
    bottom,
    hasNames,
  };
}

function drawCanvas(host, canvas, content, box) {
  const { width, height } = box;
  const ratio = devicePixelRatio || 1;
  const context = canvas.getContext("2d");
  host.style.clipPath = `inset(0 ${host.clientWidth - width}px 0 0)`;
  Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  context.scale(ratio, ratio);
  context.textBaseline = "middle";
  context.fillStyle = getComputedStyle(host).getPropertyValue("background-color");
  context.imageSmoothingEnabled = box.cellWidth * ratio < 1;
  paintCells(context, content, box);
  content.drawOver?.(context, box);
  const { fontFamily, color } = getComputedStyle(canvas);
  if (box.hasNames) {
    context.fillStyle = color;
    drawRowNames(context, content, box, fontFamily);
    if (box.bottom) drawColumnNames(context, content, box);
  }
  if (content.text && box.cellWidth >= MIN_WRITTEN_WIDTH && box.cellHeight >= MIN_WRITTEN_HEIGHT) {
    writeCells(context, content, box, fontFamily);
  }
}

/** Paint the colors of the cells; places without a cell keep the fill color. */
function paintCells(context, { rows, cols, color, signed }, { left, width, cellHeight }) {
  const image = new ImageData(cols, rows);
  const pixels = new Uint32Array(image.data.buffer);
  const colors = palette(signed);
  for (let i = 0; i < rows; i++) {
    for (let j = 0; j < cols; j++) {
      const index = color(i, j);
      if (index >= 0) pixels[i * cols + j] = colors[index];
    }
  }
  const onePixelPerCell = el("canvas", { width: cols, height: rows });
  onePixelPerCell.getContext("2d").putImageData(image, 0, 0);
  context.fillRect(left, 0, width - left, rows * cellHeight);
  context.drawImage(onePixelPerCell, left, 0, width - left, rows * cellHeight);
}

function drawRowNames(context, content, { left, cellWidth, cellHeight }, fontFamily) {
  const maxFontSize = 0.95 * (content.colNames ? Math.min(cellWidth, cellHeight) : cellHeight);
  context.font = `${content.upright ? 10.5 : Math.min(11, maxFontSize)}px ${fontFamily}`;
  context.textAlign = "right";
  const stride = content.upright ? Math.ceil(11 / cellHeight) : 1; // names do not overlap
  for (let i = 0; i < content.rows; i += stride) {
    context.fillText(content.rowNames[i], left - 5, (i + 0.5) * cellHeight, left - 6);
  }
}

/** Draw the names of the columns in the font of the rows' names. */
function drawColumnNames(context, content, { left, cellWidth, cellHeight, bottom }) {
  const stride = content.upright ? Math.ceil(26 / cellWidth) : 1; // names do not overlap
  for (let j = 0; j < content.cols; j += stride) {
    context.save();
    context.translate(left + (j + 0.5) * cellWidth, content.rows * cellHeight + 5);
    if (content.upright) {
      context.textAlign = "center";
      context.fillText(content.colNames[j], 0, 6, 40);
    } else {
      context.rotate(-Math.PI / 2);
      context.fillText(content.colNames[j], 0, 0, bottom - 6);
    }
    context.restore();
  }
}

function writeCells(context, content, { left, cellWidth, cellHeight }, fontFamily) {
  context.textAlign = "center";
  context.font = `${Math.min(12, cellWidth / 2.9)}px ${fontFamily}`;
  for (let i = 0; i < content.rows; i++) {
    for (let j = 0; j < content.cols; j++) {
      const index = content.color(i, j);
      if (index < 0) continue;
      context.fillStyle = inkOn(index, content.signed);
      context.fillText(content.text(i, j), left + (j + 0.5) * cellWidth, (i + 0.5) * cellHeight);
    }
  }
}
