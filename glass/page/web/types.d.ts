/**
 * Shapes that several modules of the page share; `tsc` checks them.
 *
 * A matrix (n, m) is an array of n · m numbers, row after row. Letters: L layers, H query heads of
 * each, T tokens, C channels, d_v the size of a value.
 */

// ---- the model

/** As config.py defines it. */
type GPTConfig = Record<string, any>;

/** Parameters by name. */
type Weights = Record<string, { shape: number[]; data: Float32Array | Float64Array }>;

/**
 * A function that may change activations in place, of the tokens from `start` on: the input of a
 * block (n, C), the per-head outputs before W_O (n, H, d_v) or what the MLP writes (n, C).
 */
type Tap = (
  name: "residual" | "heads" | "mlp",
  layer: number,
  values: Float32Array,
  start: number,
) => void;

/** An activation that is copied from another pass. */
interface Patch {
  /** The residual stream before a block at one token, or a head or an MLP at all tokens. */
  kind: "residual" | "heads" | "mlp";
  layer: number;
  /** Token of the residual stream or number of the head; 0 for an MLP. */
  index: number;
}

/** Token ids: patching measures the logit of one minus that of the other, after the last token. */
interface Contrast {
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
  /** Whether a request is not answered yet. */
  isBusy(): boolean;
  /** Says in a sentence why a request failed. */
  describeFailure(error: Error): string;
}

/** A text, and what the model that reads it lacks. */
interface Input {
  /** Step of the weights. */
  step: number;
  ids: number[];
  /** Ablated heads, as "L1H3". */
  off: string[];
  /** Tokens hidden from all later ones. */
  hidden: number[];
}

/** `ids` is the clean text; the answer is predicted after token i, later ones are not read. */
interface PatchingParameters extends Input, Contrast {
  /** As many tokens. */
  corrupted: number[];
  i: number;
  /** From the clean text to the corrupted one or the other way round. */
  direction: "denoising" | "noising";
  /** Names of the patches of every run, as "L2H1". */
  patched: string[];
}

type Handler = (
  parameters: any,
  sendPart: (part: object) => void,
  isCanceled: () => Promise<boolean>,
) => any;

// ---- what the page shows

type Cells = import("./cells.js").Cells;
type Predictions = import("./cells.js").Predictions;

/** A text on which attention was captured. */
interface Probe {
  name: string;
  /** Tokens after which they repeat; null for text. */
  period: number | null;
  T: number;
  tokens: string[];
  ids: number[];
  /** Of each step: places of the weights and of the value norms, and their largest product. */
  maps: number[][];
  /** Of each step: places of the numbers and of the ids, and the largest effect. */
  tokenEffects: (number[] | null)[];
}

interface OwnText extends Probe {
  off: string[];
  hidden: number[];
  view: Cells | null;
  predictions: Predictions | null;
}

interface CellArrays {
  L: number;
  H: number;
  tokens: string[];
  /** Top of the color scale, the same at every step. */
  largest: number;
  /** The values of each head, layer · H + head: a lower triangle, row after row. */
  triangles: (Float32Array | Uint8Array)[];
  /** ‖v W_O‖ of each token, (L, H, T). */
  norms?: Float32Array | null;
  /** Weights on the first token, (L, H, T), if they are not in the triangles. */
  firstWeights?: Float32Array | null;
  /** What the values of each row are multiples of, (L, H, T). */
  units?: Float32Array | null;
}

/** Predictions without interventions, of each token. */
interface Unchanged {
  chances: number[][];
  losses: ArrayLike<number>;
}

/** Which maps are read: one head's, or their average if `head` is null. */
interface Maps {
  layer: number;
  head: number | null;
  weightByValues: boolean;
}

interface NextToken {
  id: number;
  chance: number;
}

interface PatchingResults {
  /** Sentence that says why nothing is measured. */
  problem: string;
  cleanTokens: string[];
  corruptedTokens: string[];
  /** Token after which the answer is predicted. */
  i: number;
  first: number;
  cleanNext: NextToken[];
  corruptedNext: NextToken[];
  answer: number | null;
  wrong: number | null;
  kept: string[];
  /** Logit differences of the runs, and likeliest next tokens of the patched one. */
  contrast: { clean: number; corrupted: number; patched: number; next: NextToken[] } | null;
  /** Logit differences with one more patch, by "row,column". */
  cells: { residual: Map<string, number>; component: Map<string, number> };
}

interface PatchingTask {
  input: Input & { i: number };
  /** Whether the reader still wants it. */
  isCurrent(): boolean;
  draw(): void;
  drawCells(): void;
}

/** As generation/scoring.py writes it. */
interface ScoredText {
  /** Mean loss and bits per byte. */
  summary: string;
  /** The first tokens of the text, and their losses in nats. */
  tokens: string[];
  losses: number[];
  /** Number of tokens in the whole text. */
  tokenCount: number;
  /** Number of tokens that the model reads at once. */
  window: number;
  vocabSize: number;
}

interface Window {
  /** Functions for the browser's console. */
  glass: Record<string, Function>;
}
