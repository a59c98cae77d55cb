// Numbers of a run's page, and how they are written. They come from the page itself and, while it is served live, from data.
const SVG = "http://www.w3.org/2000/svg";
const first = JSON.parse(document.querySelector("script.numbers").textContent);
const LABELS = new Map([
  ["loss", "Loss"], ["grad_norm", "Gradient norm before clipping"], ["lr", "Learning rate"],
  ["tokens_per_second", "Tokens per second of a step"], ["tokens", "Tokens of a step"], ["seconds", "Seconds of a step"],
]);
const PLACES = {step: "optimizer steps", seen: "tokens trained on", time: "time since the start"};
const NARROW = matchMedia("(max-width:600px)");

// --- small things ------------------------------------------------------------------------------------------------------

/** An element with attributes, classes and children; texts stay texts. */
function make(tag, settings = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(settings)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter(child => child != null));
  return element;
}

function draw(tag, attributes, parent) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (parent) parent.append(element);
  return element;
}

const finite = value => value != null && Number.isFinite(value);

/** The index of the first place that is not before a value. */
function placeOf(xs, value) {
  let low = 0, high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

function nearest(xs, value) {
  const at = placeOf(xs, value);
  return at > 0 && (at === xs.length || value - xs[at - 1] < xs[at] - value) ? at - 1 : at;
}

/** Of a curve that only rises, at any place. */
function between(xs, ys, x) {
  const at = placeOf(xs, x);
  if (at === 0) return xs.length && xs[0] > 0 ? ys[0] * Math.max(0, x) / xs[0] : 0;
  if (at === xs.length) return ys[at - 1];
  return ys[at - 1] + (ys[at] - ys[at - 1]) * (x - xs[at - 1]) / (xs[at] - xs[at - 1] || 1);
}

function duration(seconds) {
  const whole = Math.round(Math.abs(seconds)), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  if (hours) return `${hours} h ${String(minutes).padStart(2, "0")} min`;
  return minutes ? `${minutes} min ${String(whole % 60).padStart(2, "0")} s` : `${(+seconds).toPrecision(seconds < 10 ? 2 : 3) * 1} s`;
}

const percent = value => `${(100 * value).toFixed(1)} %`;

function number(value) {
  if (!finite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e5) return value.toLocaleString("en", {maximumFractionDigits: 0});
  if (size && size < 1e-3) return value.toExponential(2).replace("e-", "e−");
  return size >= 1000 ? value.toFixed(0) : size >= 100 ? value.toFixed(1) : value.toFixed(4);
}

function tickText(value, step) {
  const size = Math.abs(value);
  if (!value) return "0";
  if (step >= 1e6 || (size >= 1e6 && step >= 1e4)) return `${+(value / 1e6).toFixed(2)}M`;
  if (step >= 1000 || (size >= 1e4 && step >= 100)) return `${+(value / 1e3).toFixed(1)}k`;
  if (size < 1e-3 || step < 1e-4) return value.toExponential(Math.max(0, Math.floor(Math.log10(size) + 1e-9) - Math.floor(Math.log10(step) + 1e-9))).replace("e-", "e−").replace("e+", "e");
  return value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
}

// --- what is known of the run ------------------------------------------------------------------------------------------

const run = {look: -1, jobs: [], machine: null, ranks: 1, status: "", several: false};
const hidden = new Set();
/** By job, in the order of the page: columns of its steps and evaluations, generated texts, what is drawn of it. */
let series = [];

function columnsOf(news) {
  if (!news) return null;
  const columns = {places: {}, every: news.every, count: news.count};
  for (const name of ["step", "time", "seen"]) if (news[name]) columns.places[name] = news[name];
  for (const kind of ["mean", "low", "high"]) columns[kind] = new Map(Object.entries(news[kind] || {}));
  return columns;
}

function take(news) {
  Object.assign(run, {look: news.look, jobs: news.jobs, ranks: news.ranks, status: news.status, several: Boolean(news.several)});
  series = news.jobs.map(job => ({steps: columnsOf(job.steps), evals: columnsOf(job.evals), samples: job.samples, smooth: new Map()}));
  run.machine = columnsOf(news.machine);
}

function metrics() {
  const found = new Set();
  for (const own of series) {
    if (own.steps) for (const key of own.steps.mean.keys()) found.add(key);
    if (own.evals) for (const key of own.evals.mean.keys()) found.add(key);
  }
  const known = [...LABELS.keys()].filter(key => found.delete(key));
  return ["loss", ...[...found].sort(), ...known.filter(key => key !== "loss")];
}

/** The mean over `share` of a job's places around each, where there is a value. */
function smoothed(own, key, share) {
  const name = `${share} ${key}`;
  if (!own.smooth.has(name)) own.smooth.set(name, runningMean(own.steps.mean.get(key), share));
  return own.smooth.get(name);
}

function runningMean(values, share) {
  const half = Math.floor(Math.max(share ? 3 : 1, values.length * share) / 2);
  const sums = [0], counts = [0];
  for (const value of values) {
    sums.push(sums[sums.length - 1] + (finite(value) ? value : 0));
    counts.push(counts[counts.length - 1] + finite(value));
  }
  return values.map((value, at) => {
    const start = Math.max(0, at - half), stop = Math.min(values.length, at + half + 1), many = counts[stop] - counts[start];
    return many && finite(value) ? (sums[stop] - sums[start]) / many : null;
  });
}
