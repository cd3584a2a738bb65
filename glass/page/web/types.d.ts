/**
 * Shapes that several modules of the pages share; `tsc` checks them.
 *
 * A matrix (n, m) is an array of n · m numbers, row after row. Letters: L layers, H query heads of
 * each, T tokens, C channels, d_v the size of a value.
 */

// ---- the model

/** As config.py defines it. */
type GPTConfig = Record<string, any>;

/** Parameters by name. */
type Weights = Record<string, { shape: number[]; data: Float32Array }>;

/**
 * A function that may change activations in place, of the tokens from `start` on: the input of a
 * block (n, C), the per-head outputs before W_O (n, H, d_v) or what the MLP writes (n, C).
 */
type Tap = (name: Patch["kind"], layer: number, values: Float32Array, start: number) => void;

/** An activation that is copied from another pass. */
interface Patch {
  kind: "residual" | "heads" | "mlp"; // the residual stream before a block, at one token
  layer: number;
  index: number; // token of the residual stream or number of the head; 0 for an MLP
}

/** Token ids: patching measures the logit of one minus that of the other, after the last token. */
interface Answers {
  answer: number;
  wrong: number;
}

// ---- asking the model

/** What runs the model: worker_transport.js or server_transport.js. */
interface Transport {
  /** Parameters of a request about a text are an `Input`; others have no `step`. */
  send(request: string, parameters?: Record<string, any>, onPart?: (part: any) => void): Promise<any>;
  /** Stops all requests of a name; their promises resolve to undefined. */
  cancel(request: string): void;
  isBusy(): boolean; // whether a request is not answered yet
  describeFailure(error: Error): string; // in a sentence
}

/** A text, and the interventions with which the model reads it. */
interface Input {
  step: number; // of the weights
  ids: number[];
  off: string[]; // ablated heads, as "L1H3"
  hidden: number[]; // tokens hidden from all later ones
}

/** `ids` is the clean text; the answer is predicted after token i, later ones are not read. */
interface PatchingParameters extends Input, Answers {
  corrupted: number[]; // as many tokens
  i: number;
  direction: "denoising" | "noising"; // from the clean text to the corrupted one, or back
  patched: string[]; // names of the patches of every run, as "L2H1"
}

type Handler = (
  parameters: any,
  sendPart: (part: object) => void,
  isCanceled: () => Promise<boolean>,
) => any;

// ---- what a run's page shows

type Cells = import("./state/cells.js").Cells;
type Predictions = import("./state/cells.js").Predictions;

/** A text on which attention was captured. */
interface Probe {
  name: string;
  period: number | null; // tokens after which they repeat; null for text
  T: number;
  tokens: string[];
  ids: number[];
  maps: number[][]; // of each step: places of the weights and the value norms, largest product
  tokenEffects: (number[] | null)[]; // of each step: places of the numbers and ids, largest effect
}

/** Which maps are read: one head's, or their average if `head` is null. */
interface MapChoice {
  layer: number;
  head: number | null;
  weightByValues: boolean;
}

/** As generation/scoring.py writes it. */
interface ScoredText {
  summary: string; // mean loss and bits per byte
  tokens: string[]; // the first ones of the text
  losses: number[]; // theirs, in nats
  tokenCount: number; // of the whole text
  window: number; // tokens that the model reads at once
  vocabSize: number;
}

/** As glass/heads/say/findings.py states it. */
interface Finding {
  title: string; // the phenomenon: "Induction head"
  text: string; // sentences that explain it
  details: string[]; // measurements with standard errors
  heads: string[]; // names, strongest first
}

interface Score {
  label: string;
  unit?: string; // missing if it is a share
  isSigned?: boolean; // whether it is from -1 to 1
  explanation: string; // one sentence
}

interface Window {
  glass: Record<string, Function>; // for the browser's console
}

// ---- tables and bars

/** Where cells are on a canvas, in pixels. */
interface CellBox {
  left: number;
  cellWidth: number;
  cellHeight: number;
  width: number;
  height: number;
  bottom: number; // height of the names of the columns
  hasNames: boolean;
}

/** What a `CellGrid` shows. A cell is (row, column). */
interface GridContent {
  rows: number;
  cols: number;
  color(i: number, j: number): number; // a color from 0 to 255; -1 if there is no such cell
  signed?: boolean; // whether the colors have two ends
  describe(i: number, j: number): Node[]; // what the tooltip says
  text?: ((i: number, j: number) => string) | null; // what is written in a cell
  pick?(i: number, j: number): void; // at a click
  enter?(i: number, j: number): void; // the cursor enters a cell
  leave?(): void; // the cursor leaves the grid
  drawOver?(context: CanvasRenderingContext2D, box: CellBox): void;
  start?: number[]; // cell at which the keyboard starts
  maxWidth?: number;
  minNamedWidth?: number; // of a cell from which rows and columns have names
  cellHeight?: number; // as high as wide if missing
  upright?: boolean; // whether the names of columns are not turned
  rowNames?: string[];
  colNames?: string[];
}

interface Bar {
  name: string;
  value: number;
  detail?: string; // a second number
  pick?: (() => void) | null; // at a click on the name
}

interface Column {
  id: string;
  name: string; // heading
  explanation?: string; // one sentence
  isText?: boolean; // cells are aligned to the left
  sortValue(setting: number): number | null; // settings without one come last
  cell(setting: number): Node | string;
}

// ---- charts

/** An empty chart; all sizes are in pixels. */
interface ChartFrame {
  svg: SVGElement;
  plot: SVGElement; // the group whose marks are clipped to the plotting area
  width: number;
  height: number; // down to the tick labels of the x axis
  left: number;
  right: number;
}

interface EndLabel {
  text: string;
  y: number; // where its line ends
  color: string; // a CSS custom property, without its dashes
  group?: number | string;
}

interface Series {
  name: string;
  xs: number[]; // training steps or other numbers, ascending
  ys: (number | null)[]; // null leaves a gap
  errors?: (number | null)[]; // drawn as a band, or as bars if there are dots
  color: string; // a CSS custom property, without its dashes
  bold?: boolean;
  faint?: boolean;
  dash?: string; // an SVG stroke-dasharray
  label?: string; // at the line's right end
  group?: number;
  dots?: Dot[]; // marked values
  isJoined?: boolean; // whether there is a line; true if missing
  detail?: string; // what a tooltip says about the line
  settings?: number[]; // of each value
}

/** A marked value of a series. */
interface Dot {
  k: number; // its index
  color: string;
  group?: number;
}

interface LineChart {
  title: string; // with the unit of the y axis
  explanation?: string;
  series: Series[];
  height?: number; // pixels down to the tick labels of the x axis
  xName?: string; // "step" if missing
  xTicks?: [number, string][]; // round numbers if missing
  hasLogX?: boolean; // no x is negative
  currentStep?: number | null;
  includes?: number[]; // values that the y axis includes in any case
  yMax?: number; // values above are cut off
  extraSteps?: number[]; // steps that the x axis includes in any case
  // Draws below the x axis and returns the height that it used
  drawBelow?: (svg: SVGElement, x: (step: number) => number, top: number, width: number) => number;
  describe?: (series: Series, index: number) => Node[]; // of one value; if missing, of all series
  onNear?: (series: Series | null, index?: number) => void;
}

// ---- the data of a sweep's page

interface Curve {
  steps: number[];
  values: number[];
  of: number; // measured points, of which the curve keeps some
}

interface SweepRun {
  name: string; // its folder
  title: string; // its setting and seed
  page: string | null; // address of the run's own page
  status: "finished" | "failed" | "unfinished";
  reason: string; // why the run failed or could not be continued; "" if it did not
  steps: string;
  setting: number;
  label: string; // in the table: its seed
  figures: Record<string, number | null>;
  curves: Record<string, Curve>;
  heads: Record<string, Curve>; // of the strongest head, or the mean over the heads
  emerged: Record<string, number>; // for each kind of head, the step at which the first one emerged
}

interface SweptKey {
  name: string;
  values: string[]; // of each setting
  levels: string[]; // the different values in their order
  positions: number[]; // of each setting on an axis
  ticks: [number, string][];
  axis: "log" | "linear" | "names";
}

/** A number of each setting: with a mean, its standard error, and both as a text. */
interface SweepFigure {
  name: string;
  title: string;
  unit: string;
  values: (number | null)[];
  errors: (number | null)[];
  texts: string[];
}
