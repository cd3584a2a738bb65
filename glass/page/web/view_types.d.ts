/** Shapes that the views of the page share; `tsc` checks them. */

/** Where cells are on a canvas, in pixels. */
interface CellBox {
  left: number;
  cellWidth: number;
  cellHeight: number;
  width: number;
  height: number;
  /** Height of the names of the columns. */
  bottom: number;
  hasNames: boolean;
}

/** What a `CellGrid` shows. A cell is (row, column). */
interface GridContent {
  rows: number;
  cols: number;
  /** Index of the cell's color, from 0 to 255; -1 if there is no such cell. */
  level(i: number, j: number): number;
  /** Whether the colors have two ends. */
  signed?: boolean;
  /** What the tooltip says. */
  describe(i: number, j: number): Node[];
  /** What is written in a cell. */
  write?: ((i: number, j: number) => string) | null;
  /** Called when a cell is clicked. */
  pick?(i: number, j: number): void;
  /** Called when the cursor enters a cell. */
  enter?(i: number, j: number): void;
  /** Called when the cursor leaves the grid. */
  leave?(): void;
  drawOver?(context: CanvasRenderingContext2D, box: CellBox): void;
  /** Cell at which the keyboard starts. */
  start?: number[];
  maxWidth?: number;
  /** Width of a cell from which rows and columns have names. */
  minNamedWidth?: number;
  /** As high as wide if missing. */
  cellHeight?: number;
  /** Whether the names of columns are not turned. */
  upright?: boolean;
  rowNames?: string[];
  colNames?: string[];
}

interface Bar {
  name: string;
  value: number;
  /** A second number. */
  detail?: string;
  /** Called when the name is clicked. */
  pick?: (() => void) | null;
}

interface Column<Row> {
  id: string;
  /** Heading. */
  name: string;
  /** One sentence about the column. */
  explanation?: string;
  /** Whether its cells are aligned to the left. */
  isText?: boolean;
  /** Unknown values come last. */
  sortValue?(row: Row): string | number | null | undefined;
  /** Content of a cell. */
  cell(row: Row): Node | string | number;
}

/** How a table is sorted: descending (-1), in its original order (0) or ascending. */
interface Sorting {
  column: number | null;
  sign: number;
}

/** As glass/heads/findings.py states it. */
interface Finding {
  /** The phenomenon: "Induction head". */
  title: string;
  /** Sentences that explain it. */
  text: string;
  /** Measurements with standard errors. */
  details: string[];
  /** Names of the heads, strongest first. */
  heads: string[];
}

interface Score {
  label: string;
  /** Missing if it is a share or has none. */
  unit?: string;
  /** One sentence. */
  explanation: string;
}

interface Emergence {
  score: string;
  /** Name of the head. */
  name: string;
  layer: number;
  head: number;
  /** First snapshot at which the head passed the score's threshold. */
  step: number;
  /** The interval in which it emerged, in words. */
  interval: string;
  /** Last snapshot before its score fell below the threshold by more than two standard errors. */
  lostStep: number | null;
}

/** The share of a head's score that is lost without what an upstream component wrote. */
interface Composition {
  score: string;
  /** Layer and head. */
  to: number[];
  /** Input of the head in which the component is removed: queries, keys or values. */
  input: string;
  /** The upstream component: L0H1, L0MLP or embedding. */
  from: string;
  share: number;
  /** Standard error. */
  error: number;
  /** The share if nothing in between is computed again. */
  directShare: number | null;
  directError: number | null;
}
