/** Shapes of the data of a sweep's page, and of the charts that it shares with a run's page. */

interface Curve {
  steps: number[];
  values: number[];
  of: number; // measured points, of which the curve keeps some
}

interface SweepRun {
  name: string;
  page: string | null; // address of the run's own page
  status: "finished" | "failed" | "unfinished";
  reason: string; // why the run failed or could not be continued; "" if it did not
  step: number;
  maxSteps: number | null;
  setting: number;
  seed: string;
  values: string[];
  valueIndices: number[]; // for each swept key, the index of the run's value
  figures: Record<string, number | null>;
  curves: Record<string, Curve>;
  heads: Record<string, Curve>; // of the strongest head, or the mean over the heads
  emerged: Record<string, number>; // for each kind of head, the step at which the first one emerged
  events: Record<string, number | null>; // for each metric of a study
}

interface SweptKey {
  name: string;
  values: string[]; // in their order
  axis: "names" | "linear" | "log";
  numbers: number[] | null; // null if a value is not a number
}

/** A number of a run. */
interface SweepFigure {
  name: string;
  title: string;
  unit: string;
  better: "lower" | "higher" | "";
  isLarge: boolean; // written with a prefix: 115k
  isTime: boolean; // censored in runs that do not have it
  section: "loss" | "cost" | "heads";
}

/** A figure of a setting: the mean over its measured runs; of a time, the median. */
interface SweepResult {
  value: number | null;
  error: number | null;
  count: number; // runs that have the figure
}

/** What a figure is drawn against. */
interface Abscissa {
  id: string;
  name: string;
  key: number | null; // index of the swept key; null: a cost
  toValue: (run: SweepRun) => number | null;
  describe?: (value: number | null) => string;
  axis: DotAxis;
}

interface StudyTable {
  title: string;
  columns: string[];
  rows: string[][];
  text_columns: number; // columns that are aligned to the left
}

interface Dot {
  x: number | null;
  y: number | null;
  error?: number | null;
  group: number;
  small?: boolean; // one run rather than a mean
  nodes: Node[]; // what the tooltip says
}

interface DotAxis {
  type: "log" | "linear" | "names";
  ticks: [number, string][];
  name: string; // with its unit
}

interface DotChart {
  title: string; // with the unit of the y axis
  dots: Dot[]; // those without x or y are left out
  lines: { name: string; dots: Dot[] }[];
  axis: DotAxis;
  ringedGroup: number | null;
  cutsOutliers: boolean; // draws them at the upper edge, not to scale
  onNear: (dot: Dot | null) => void;
  onPick: (dot: Dot) => void;
}

interface Series {
  name: string;
  xs: number[]; // training steps, ascending
  ys: (number | null)[]; // null leaves a gap
  errors?: (number | null)[]; // drawn as a band
  color: string; // a CSS custom property, without its dashes
  bold?: boolean;
  faint?: boolean;
  dash?: string; // an SVG stroke-dasharray
  label?: string; // at the line's right end
  group?: number;
  dots?: number[]; // indices of marked values
  run?: SweepRun;
  seedCount?: number;
}

interface LineChart {
  title: string; // with the unit of the y axis
  explanation?: string;
  series: Series[];
  height?: number; // pixels down to the tick labels of the x axis
  currentStep?: number | null;
  includes?: number[]; // values that the y axis includes in any case
  yMax?: number; // values above are cut off
  extraSteps?: number[]; // steps that the x axis includes in any case
  hasLogSteps?: boolean; // all steps are positive
  // Draws below the x axis and returns the height that it used
  drawBelow?: (svg: SVGElement, x: (step: number) => number, top: number, width: number) => number;
  describe?: (series: Series, index: number) => Node[]; // of one value; if missing, of all series
  onNear?: (series: Series | null) => void;
}

/** An empty chart; all sizes are in pixels. */
interface ChartFrame {
  svg: SVGElement;
  plot: SVGElement; // the group whose marks are clipped to the plotting area
  width: number;
  height: number;
  left: number;
  right: number;
  bottom: number;
}

interface EndLabel {
  text: string;
  y: number; // where its line ends
  color: string; // a CSS custom property, without its dashes
  group?: number | string;
}
