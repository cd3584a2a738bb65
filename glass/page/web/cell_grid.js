/** A table of colored cells on a canvas, with a cursor for pointer and keyboard. */

import { isDark, palette } from "./colors.js";
import { $, el } from "./dom.js";
import { announce, showTooltip } from "./tooltip.js";

/** Pixels of a cell from which its value is written in it. */
const MIN_WRITTEN_WIDTH = 24;
const MIN_WRITTEN_HEIGHT = 12;
/** Pixels of a cell from which the rows have names. */
const MIN_NAMED_WIDTH = 8.5;
const MAX_NAME_WIDTH = 92;
/** Rows down and columns to the right that an arrow key moves the cursor. */
const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
/** Pixels below the cells for names that are not turned. */
const UPRIGHT_NAME_HEIGHT = 18;

/**
 * What a grid shows. A cell is (row, column).
 *
 * @typedef {object} CellGrid
 * @property {number} rows
 * @property {number} cols
 * @property {(i: number, j: number) => number} level - Index of the cell's color, from 0 to 255; -1
 *   if there is no such cell.
 * @property {boolean} [signed] - Whether the colors have two ends.
 * @property {(i: number, j: number) => Node[]} tell - What the tooltip says.
 * @property {((i: number, j: number) => string) | null} [write] - What is written in a cell.
 * @property {(i: number, j: number) => void} [pick] - Called when a cell is clicked.
 * @property {(i: number, j: number) => void} [enter] - Called when the cursor enters a cell.
 * @property {() => void} [leave] - Called when the cursor leaves the grid.
 * @property {(context: CanvasRenderingContext2D, box: Box) => void} [over] - Draws over the cells.
 * @property {[number, number]} [start] - Cell at which the keyboard starts.
 * @property {number} [most] - Largest width in pixels.
 * @property {number} [least] - Width of a cell in pixels from which rows and columns have names.
 * @property {number} [high] - Height of a cell in pixels; as high as wide if missing.
 * @property {boolean} [upright] - Whether the names of columns are not turned.
 * @property {string[]} [rowNames]
 * @property {string[]} [colNames]
 */

/**
 * Where the cells are on the canvas, in pixels.
 *
 * @typedef {object} Box
 * @property {number} left
 * @property {number} cell - Width of a cell.
 * @property {number} high - Height of a cell.
 */

/**
 * Add an empty grid to an element.
 *
 * @param {HTMLElement} host
 * @param {string} label - Name of the grid for screen readers.
 * @returns {((grid: CellGrid) => void) & {mark: (i: number, j: number) => void}} A function that
 *   draws a grid, and `mark`, which marks a cell.
 */
export function createCellGrid(host, label) {
  const canvas = el("canvas", { tabIndex: 0, role: "application", "aria-label": label });
  const cursor = createCursor(host, canvas);
  const draw = grid => {
    const box = measureGrid(host, canvas, grid);
    cursor.show(grid, box);
    drawGrid(host, canvas, grid, box);
    cursor.restore();
  };
  return Object.assign(draw, { mark: cursor.mark });
}

/**
 * Add the canvas and the marks of its cursor: the row, the column and the cell. Pointer and arrow
 * keys move the cursor.
 *
 * @param {HTMLElement} host
 * @param {HTMLCanvasElement} canvas
 */
function createCursor(host, canvas) {
  const [rowMark, columnMark, cellMark] = ["row", "column", "cell"].map(name =>
    el("div", { className: `mark ${name}`, hidden: true }),
  );
  const marks = [rowMark, columnMark, cellMark];
  host.append(canvas, ...marks);
  /** @type {CellGrid | null} */
  let grid = null;
  /** @type {Box | null} */
  let box = null;
  /** @type {[number, number] | null} */
  let markedCell = null;
  let hasTooltip = false;

  function hasCell(i, j) {
    const isInside = i >= 0 && j >= 0 && i < grid.rows && j < grid.cols;
    return isInside && grid.level(i, j) >= 0;
  }

  /** Mark a cell, or none if there is no such cell. */
  function mark(i, j) {
    const isCell = grid !== null && hasCell(i, j);
    markedCell = isCell ? [i, j] : null;
    hasTooltip = false;
    for (const element of marks) element.hidden = !isCell;
    if (!isCell) return;
    const [x, y] = [box.left + j * box.cell, i * box.high];
    place(rowMark, box.left, y, grid.cols * box.cell, box.high);
    place(columnMark, x, 0, box.cell, grid.rows * box.high);
    place(cellMark, x, y, box.cell, box.high);
  }

  function pointAt(i, j, isAnnounced = false) {
    mark(i, j);
    if (!markedCell) {
      showTooltip(null);
      return;
    }
    hasTooltip = true;
    const nodes = grid.tell(i, j);
    const corner = canvas.getBoundingClientRect();
    showTooltip(
      nodes,
      corner.left + box.left + (j + 1) * box.cell,
      corner.top + (i + 1) * box.high,
    );
    if (isAnnounced) announce(nodes);
    grid.enter?.(i, j);
  }

  function leave() {
    mark(-1, -1);
    showTooltip(null);
    grid?.leave?.();
  }

  function cellUnder(event) {
    const corner = canvas.getBoundingClientRect();
    const row = (event.clientY - corner.top) / box.high;
    const column = (event.clientX - corner.left - box.left) / box.cell;
    return [Math.floor(row), Math.floor(column)];
  }

  function onPointer(event) {
    const [i, j] = cellUnder(event);
    if (markedCell?.[0] !== i || markedCell?.[1] !== j || $("tip").hidden) pointAt(i, j);
  }

  function onKeyDown(event) {
    const [i, j] = markedCell ?? [grid.rows - 1, 0];
    if (event.key === "Escape") {
      leave();
      return;
    }
    if (event.key === "Home") {
      event.preventDefault();
      if (hasCell(i, 0)) pointAt(i, 0, true);
      return;
    }
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      if (markedCell) grid.pick?.(i, j);
      return;
    }
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    const target = nextCell(i, j, ...step);
    if (target) pointAt(...target, true);
  }

  /** Return the next cell in a direction, beyond places without a cell; null if there is none. */
  function nextCell(i, j, down, right) {
    const size = Math.max(grid.rows, grid.cols);
    for (let n = 1; n <= size; n++) {
      if (hasCell(i + n * down, j + n * right)) return [i + n * down, j + n * right];
    }
    return null;
  }

  canvas.onpointermove = onPointer;
  canvas.onpointerdown = onPointer;
  canvas.onpointerleave = leave;
  canvas.onblur = leave;
  canvas.onfocus = () => {
    if (!canvas.matches(":focus-visible")) return;
    const [i, j] = grid.start ?? [grid.rows - 1, 0];
    pointAt(i, j, true);
  };
  canvas.onclick = event => {
    const [i, j] = cellUnder(event);
    if (hasCell(i, j)) grid.pick?.(i, j);
  };
  canvas.onkeydown = onKeyDown;

  return {
    mark,
    /** Use another grid. */
    show(newGrid, newBox) {
      grid = newGrid;
      box = newBox;
    },
    /** Mark the same cell again, after the grid has been drawn. */
    restore() {
      if (!markedCell) return;
      if (hasTooltip && !$("tip").hidden) pointAt(...markedCell);
      else mark(...markedCell);
    },
  };
}

/**
 * @param {HTMLElement} element
 * @param {number} x
 * @param {number} y
 * @param {number} width
 * @param {number} height
 */
function place(element, x, y, width, height) {
  Object.assign(element.style, {
    left: `${x}px`,
    top: `${y}px`,
    width: `${width}px`,
    height: `${height}px`,
  });
}

/**
 * Fit a grid into its host and set the size of the canvas.
 *
 * @param {HTMLElement} host
 * @param {HTMLCanvasElement} canvas
 * @param {CellGrid} grid
 * @returns {Box & {width: number, height: number, bottom: number, hasNames: boolean}} `bottom` is
 *   the height of the names of the columns.
 */
function measureGrid(host, canvas, grid) {
  const width = Math.min(host.clientWidth, grid.most ?? Infinity);
  const context = canvas.getContext("2d");
  context.font = `11px ${getComputedStyle(canvas).fontFamily}`;
  const widthOf = names => {
    const widths = names.map(name => context.measureText(name).width);
    return Math.min(MAX_NAME_WIDTH, Math.max(...widths) + 8);
  };
  const { rowNames = [], colNames = [] } = grid;
  const nameWidth = widthOf(rowNames);
  const hasNames =
    rowNames.length > 0 && (width - nameWidth) / grid.cols >= (grid.least ?? MIN_NAMED_WIDTH);
  const left = hasNames ? nameWidth : 0;
  const columnNameHeight = grid.upright ? UPRIGHT_NAME_HEIGHT : widthOf(colNames);
  const bottom = hasNames && colNames.length ? columnNameHeight : 0;
  const cell = (width - left) / grid.cols;
  const high = grid.high ?? cell;
  return { left, cell, high, width, height: grid.rows * high + bottom, bottom, hasNames };
}

/**
 * Draw a grid.
 *
 * @param {HTMLElement} host
 * @param {HTMLCanvasElement} canvas
 * @param {CellGrid} grid
 * @param {ReturnType<typeof measureGrid>} box
 */
function drawGrid(host, canvas, grid, box) {
  const { width, height } = box;
  const ratio = devicePixelRatio || 1;
  const context = canvas.getContext("2d");
  host.style.clipPath = `inset(0 ${host.clientWidth - width}px 0 0)`;
  Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  context.scale(ratio, ratio);
  context.textBaseline = "middle";
  drawCells(context, grid, box, getComputedStyle(host).getPropertyValue("background-color"), ratio);
  grid.over?.(context, { left: box.left, cell: box.cell, high: box.high });
  const { fontFamily, color } = getComputedStyle(canvas);
  if (box.hasNames) {
    context.fillStyle = color;
    drawRowNames(context, grid, box, fontFamily);
    if (box.bottom) drawColumnNames(context, grid, box);
  }
  if (grid.write && box.cell >= MIN_WRITTEN_WIDTH && box.high >= MIN_WRITTEN_HEIGHT) {
    writeCells(context, grid, box, fontFamily);
  }
}

/**
 * Draw the colors of the cells.
 *
 * @param {CanvasRenderingContext2D} context
 * @param {CellGrid} grid
 * @param {Box & {width: number}} box
 * @param {string} background - Where there are no cells.
 * @param {number} ratio - Device pixels in a pixel.
 */
function drawCells(context, grid, { left, cell, high, width }, background, ratio) {
  const image = new ImageData(grid.cols, grid.rows);
  const pixels = new Uint32Array(image.data.buffer);
  const colors = palette(grid.signed);
  for (let i = 0; i < grid.rows; i++) {
    for (let j = 0; j < grid.cols; j++) {
      const index = grid.level(i, j);
      if (index >= 0) pixels[i * grid.cols + j] = colors[index];
    }
  }
  const onePixelPerCell = el("canvas", { width: grid.cols, height: grid.rows });
  onePixelPerCell.getContext("2d").putImageData(image, 0, 0);
  const [areaWidth, areaHeight] = [width - left, grid.rows * high];
  context.fillStyle = background;
  context.fillRect(left, 0, areaWidth, areaHeight);
  context.imageSmoothingEnabled = cell * ratio < 1;
  context.drawImage(onePixelPerCell, left, 0, areaWidth, areaHeight);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {CellGrid} grid
 * @param {Box} box
 * @param {string} fontFamily
 */
function drawRowNames(context, grid, { left, cell, high }, fontFamily) {
  const maxFontSize = 0.95 * (grid.colNames ? Math.min(cell, high) : high);
  context.font = `${grid.upright ? 10.5 : Math.min(11, maxFontSize)}px ${fontFamily}`;
  context.textAlign = "right";
  const stride = grid.upright ? Math.ceil(11 / high) : 1; // names do not overlap
  for (let i = 0; i < grid.rows; i += stride) {
    context.fillText(grid.rowNames[i], left - 5, (i + 0.5) * high, left - 6);
  }
}

/**
 * Draw the names of the columns in the font of the rows' names.
 *
 * @param {CanvasRenderingContext2D} context
 * @param {CellGrid} grid
 * @param {Box & {bottom: number}} box
 */
function drawColumnNames(context, grid, { left, cell, high, bottom }) {
  const stride = grid.upright ? Math.ceil(22 / cell) : 1; // names do not overlap
  for (let j = 0; j < grid.cols; j += stride) {
    context.save();
    context.translate(left + (j + 0.5) * cell, grid.rows * high + 5);
    if (grid.upright) {
      context.textAlign = "center";
      context.fillText(grid.colNames[j], 0, 6, 40);
    } else {
      context.rotate(-Math.PI / 2);
      context.fillText(grid.colNames[j], 0, 0, bottom - 6);
    }
    context.restore();
  }
}

/**
 * Write the values in the cells.
 *
 * @param {CanvasRenderingContext2D} context
 * @param {CellGrid} grid
 * @param {Box} box
 * @param {string} fontFamily
 */
function writeCells(context, grid, { left, cell, high }, fontFamily) {
  context.textAlign = "center";
  context.font = `${Math.min(12, cell / 2.9)}px ${fontFamily}`;
  for (let i = 0; i < grid.rows; i++) {
    for (let j = 0; j < grid.cols; j++) {
      const index = grid.level(i, j);
      if (index < 0) continue;
      context.fillStyle = isPale(index, grid.signed) ? "#16121f" : "#fff";
      context.fillText(grid.write(i, j), left + (j + 0.5) * cell, (i + 0.5) * high);
    }
  }
}

/**
 * Whether a color is so light that dark text is readable on it.
 *
 * @param {number} index - Of the color.
 * @param {boolean} [signed]
 */
function isPale(index, signed = false) {
  if (signed) return Math.abs(index - 128) > 90 === isDark();
  return (isDark() ? index : 255 - index) > 140;
}
