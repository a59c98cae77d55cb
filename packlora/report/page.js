// The page of a run: its curves, its tables, and what a reader chooses. Names and texts of users reach the page as text alone
// (textContent); the HTML of its other parts is made by sections.py.
// --- learning curves ---------------------------------------------------------------------------------------------------

const chosen = {metric: "loss", place: "step", log: false, share: 0.07};
const visible = () => run.jobs.map((job, at) => ({job, at, own: series[at]})).filter(({at, own}) => own && !hidden.has(run.jobs[at].name));
const placeText = place => value => place === "time" ? duration(value) : place === "step" ? `step ${Math.round(value).toLocaleString("en")}` : `${Math.round(value).toLocaleString("en")} tokens`;

/** Curves of a metric, and dots of what evaluations found of it; `kind`: of jobs with this kind of loss alone. */
function learning(metric, place, share, kind = null) {
  const lines = [], jobs = visible().filter(({job}) => kind === null || job.loss[0] === kind);
  for (const {job, at, own} of jobs) {
    const mean = own.steps && own.steps.mean.get(metric);
    if (mean) {
      const low = own.steps.low.get(metric), high = own.steps.high.get(metric);
      lines.push({
        job: at, name: job.name, style: job.style, xs: own.steps.places[place], ys: share ? smoothed(own, metric, share) : mean,
        faint: share ? mean : null, low, high, cross: job.status === "failed",
      });
    }
  }
  for (const {job, at, own} of jobs) {
    const found = own.evals && own.evals.mean.get(metric);
    if (!found) continue;
    const xs = own.evals.places.step.map(step => place === "step" ? step : own.steps ? between(own.steps.places.step, own.steps.places[place], step) : 0);
    lines.push({job: at, name: job.name, style: job.style, xs, ys: found, dots: true, kind: "held-out"});
  }
  return lines;
}

function curves(host) {
  const rescale = () => { for (const chart of own) chart.yZoom = null; redraw(); };
  const metric = make("select", {"aria-label": "Metric", onchange: () => { chosen.metric = metric.value; rescale(); }});
  const place = make("select", {"aria-label": "Horizontal axis", onchange: () => { chosen.place = place.value; redraw(); }},
    ...Object.entries({step: "by step", seen: "by tokens", time: "by time"}).map(([value, text]) => make("option", {value}, text)));
  const log = make("input", {type: "checkbox", onchange: () => { chosen.log = log.checked; rescale(); }});
  const told = make("output", {});
  const smooth = make("input", {type: "range", min: 0, max: 30, step: 1, value: 7, "aria-label": "Smoothing", oninput: () => { chosen.share = smooth.value / 100; tell(); redraw(); }});
  const tell = () => { told.textContent = chosen.share ? `${smooth.value} %` : "off"; };
  tell();
  const controls = make("div", {class: "controls"}, metric, place, make("label", {class: "check"}, log, "log axis"),
    make("label", {class: "slide"}, "smoothing", smooth, told));
  const caption = make("p", {class: "caption"});
  const area = make("div"), section = make("section", {class: "curves"}, make("h2", {}, "Learning curves"), controls, area, caption);
  host.append(section);
  /** Losses of several kinds have a chart each, since their units differ. */
  const kinds = () => metric.value === "loss" ? [...new Map(visible().map(({job}) => job.loss))] : [];
  const own = [];
  const shown = number => () => {
    const kind = kinds()[number], [name, unit] = kind || [null, ""];
    if (number && !kind) return null;
    const loss = kinds().length > 1 ? `${name} loss` : "Loss";
    return {
      title: kind ? loss : LABELS.get(metric.value) || metric.value, unit, place: chosen.place, log: chosen.log, zero: metric.value === "lr",
      height: NARROW.matches ? 280 : kinds().length > 1 ? 320 : 400,
      lines: learning(metric.value, chosen.place, chosen.share, name), placeText: placeText(chosen.place),
    };
  };
  own.push(new Chart(area, 400, () => {
    const names = metrics();
    if (names.join() !== [...metric.options].map(option => option.value).join()) {
      metric.replaceChildren(...names.map(name => make("option", {value: name}, LABELS.get(name) || name)));
      metric.value = names.includes(chosen.metric) ? chosen.metric : "loss";
    }
    while (own.length < kinds().length) own.push(new Chart(area, 400, shown(own.length)));
    area.className = kinds().length > 1 ? "pair" : "";
    const lines = learning(metric.value, chosen.place, chosen.share);
    section.hidden = !series.some(own => own.steps || own.evals);
    const every = Math.max(1, ...lines.map(line => line.dots ? 1 : series[line.job].steps.every));
    caption.textContent = [
      chosen.share ? `Bold: running mean over ${smooth.value} % of a job's steps; light: ${every > 1 ? `groups of up to ${every} steps, and between their lowest and highest values` : "every step"}.` : "",
      lines.some(line => line.dots) ? "Dots: held-out." : "", lines.some(line => line.cross) ? "✕: the job failed." : "",
      NARROW.matches ? "" : "Drag to zoom, double-click for the whole range.",
    ].join(" ");
    return shown(0)();
  }));
}

function optimization(host) {
  const section = make("section", {}, make("h2", {}, "Optimization")), pair = make("div", {class: "pair"});
  section.append(pair);
  host.append(section);
  const shown = key => () => {
    const lines = learning(key, chosen.place, key === "lr" ? 0 : 0.07);
    section.hidden = !series.some(own => own.steps);
    const spread = lines.flatMap(line => [Math.min(...line.ys.filter(value => value > 0)), Math.max(...line.ys.filter(value => value > 0))]).filter(finite);
    const log = key !== "lr" && spread.length > 0 && Math.max(...spread) > 30 * Math.min(...spread);
    return {title: key === "lr" ? "Learning rate" : "Gradient norm", unit: key === "lr" ? "" : log ? "before clipping, log axis" : "before clipping", place: chosen.place, log, zero: true, lines, placeText: placeText(chosen.place)};
  };
  new Chart(pair, 220, shown("lr"));
  new Chart(pair, 220, shown("grad_norm"));
}

// --- the machine -------------------------------------------------------------------------------------------------------

/** Tokens per second in equal stretches of time, job on job. */
function throughput() {
  const there = visible().filter(({own}) => own.steps && own.steps.places.time);
  const end = Math.max(0, ...there.map(({own}) => own.steps.places.time[own.steps.places.time.length - 1]));
  const points = Math.max(0, ...there.map(({own}) => own.steps.count.length)), count = Math.min(80, points);
  if (!end || !count) return [];
  const edges = Array.from({length: count + 1}, (_, at) => end * at / count);
  let floor = new Array(2 * count).fill(0);
  const lines = there.map(({job, at, own}) => {
    const {time, seen} = own.steps.places, xs = [], ys = [];
    for (let slot = 0; slot < count; slot++) {
      const rate = Math.max(0, between(time, seen, edges[slot + 1]) - between(time, seen, edges[slot])) / (edges[slot + 1] - edges[slot]);
      xs.push(edges[slot], edges[slot + 1] * (1 - 1e-9)); ys.push(rate, rate);
    }
    const stack = ys.map((value, place) => value + floor[place]);
    const line = {job: at, name: job.name, style: job.style, xs, ys, floor, stack};
    floor = stack;
    return line;
  });
  return lines;
}

/** Of microbatches between two points in time: what share of the time they took, and how full they were. */
function machine() {
  const own = run.machine;
  if (!own) return {unit: "", memory: [], use: []};
  const time = own.places.time, sum = key => own.mean.get(key).map((value, at) => value * own.count[at]);
  const tokens = sum("tokens"), room = sum("capacity"), seconds = sum("seconds");
  const size = Math.max(1, Math.ceil(time.length / 120)), xs = [], busy = [], fill = [];
  for (let start = 0; start < time.length; start += size) {
    const stop = Math.min(time.length, start + size), began = start ? time[start - 1] : time[0] - seconds[0];
    const total = column => column.slice(start, stop).reduce((a, b) => a + b, 0);
    xs.push(time[stop - 1]);
    fill.push(Math.min(1, total(tokens) / total(room)));
    const span = time[stop - 1] - began;
    busy.push(span > 0 ? Math.max(0, Math.min(1, 1 - total(seconds) / run.ranks / span)) : null);
  }
  const memory = own.high.get("memory") || own.mean.get("memory");
  const unit = memory && Math.max(...memory.filter(finite)) >= 2 ** 30 ? 30 : 20;
  return {
    unit: unit === 30 ? "GiB" : "MiB",
    memory: memory ? [{name: "memory", style: "hue-0", xs: time, ys: memory.map(value => finite(value) ? value / 2 ** unit : null)}] : [],
    use: [
      {name: "microbatches full", style: "hue-0", xs, ys: fill}, {name: "time outside of them", style: "hue-1", xs, ys: busy},
      ...(own.mean.has("gpu") ? [{name: "GPU busy", style: "hue-2", xs: time, ys: own.mean.get("gpu")}] : []),
    ],
  };
}

function machineCharts(host) {
  const section = make("section", {}, make("h2", {}, "Throughput and memory")), pair = make("div", {class: "pair three"});
  const caption = make("p", {class: "caption"});
  section.append(pair, caption);
  host.append(section);
  const text = placeText("time");
  new Chart(pair, 200, () => {
    const lines = throughput();
    section.hidden = run.several || !series.some(own => own.steps);
    caption.hidden = !run.machine;
    caption.textContent = "Microbatches full: their tokens, as a share of what they can hold. Time outside of them: evaluations, generated samples, checkpoints, and waiting for the schedule."
      + (run.machine && run.machine.mean.has("gpu") ? " GPU busy: the share of the last moments in which a kernel ran, as NVML tells." : "");
    return {title: "Tokens per second", unit: "job on job", place: "time", zero: true, lines, placeText: text, format: value => Math.round(value).toLocaleString("en")};
  });
  new Chart(pair, 200, () => {
    const {unit, memory} = machine();
    return {title: "Memory", unit, place: "time", zero: true, lines: memory, placeText: text, format: value => `${value.toPrecision(3)} ${unit}`};
  });
  new Chart(pair, 200, () => ({title: "Utilisation", unit: "", place: "time", zero: true, lines: machine().use, placeText: text, format: percent, tick: value => `${+(100 * value).toFixed(1)} %`}));
}

// --- generated samples -------------------------------------------------------------------------------------------------

function samples(host) {
  const slider = make("input", {type: "range", min: 0, step: 1, "aria-label": "Evaluation", oninput: () => { follows = +slider.value === +slider.max; show(); }});
  const told = make("output", {}), list = make("div", {class: "samples"});
  const section = make("section", {hidden: true}, make("h2", {}, "Generated samples"),
    make("div", {class: "controls"}, make("label", {class: "slide"}, "after step", slider, told)), list,
    make("p", {class: "caption"}, "What each adapter writes for its sample_prompts, greedily, at an evaluation; of each job the last one up to the chosen step."));
  host.append(section);
  let follows = true, before = "";
  function show() {
    const there = visible().filter(({own}) => own.samples.length);
    section.hidden = !series.some(own => own.samples.length);
    const steps = [...new Set(there.flatMap(({own}) => own.samples.map(one => one.step)))].sort((a, b) => a - b);
    slider.max = Math.max(0, steps.length - 1);
    if (follows) slider.value = slider.max;
    slider.parentElement.hidden = steps.length < 2;
    const step = steps[+slider.value] ?? 0;
    told.textContent = `${step}`;
    const prompts = new Map();
    for (const {job, at, own} of there) {
      const last = own.samples.filter(one => one.step <= step).pop();
      if (last) for (const [prompt, text] of last.texts) {
        if (!prompts.has(prompt)) prompts.set(prompt, []);
        prompts.get(prompt).push({job, at, step: last.step, text});
      }
    }
    const key = JSON.stringify([...prompts]);
    if (key === before) return;  // what is selected stays selected
    before = key;
    list.replaceChildren(...[...prompts].map(([prompt, answers]) => make("article", {},
      make("blockquote", {}, prompt),
      make("div", {class: "answers"}, ...answers.map(({job, at, step: own, text}) => make("div", {class: `answer ${job.style}`, "data-job": at},
        make("p", {class: "who"}, make("span", {class: "name"}, job.name), make("small", {}, `step ${own}`)),
        make("p", {class: "text"}, text || "(nothing)")))))));
  }
  return show;
}

// --- which jobs are shown ----------------------------------------------------------------------------------------------

const legend = document.querySelector("nav.legend"), lit = document.head.appendChild(make("style"));
const tools = make("span", {class: "tools"},
  make("button", {type: "button", class: "all", onclick: () => { hidden.clear(); marked(); redrawAll(); }}, "all"),
  make("input", {type: "search", placeholder: "find jobs", "aria-label": "Find jobs", hidden: true, oninput: event => find(event.target.value)}));
legend.append(tools);

function find(words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  hidden.clear();
  run.jobs.forEach(job => { if (!wanted.every(word => job.name.toLowerCase().includes(word))) hidden.add(job.name); });
  marked();
  redrawAll();
}

const solo = name => {
  const alone = run.jobs.every(job => (job.name === name) !== hidden.has(job.name));
  hidden.clear();
  if (!alone) run.jobs.forEach(job => { if (job.name !== name) hidden.add(job.name); });
};

function marked() {
  for (const button of legend.querySelectorAll("button[data-job]")) {
    const job = run.jobs[+button.dataset.job];
    button.setAttribute("aria-pressed", String(Boolean(job) && !hidden.has(job.name)));
    button.title = "Click: show or hide. Double-click: this one alone.";
  }
  for (const row of document.querySelectorAll(":is([data-part=jobs],[data-part=sweep]) tbody tr")) row.classList.toggle("off", hidden.has(row.dataset.key));
  legend.hidden = run.jobs.length < 1;
  tools.hidden = run.jobs.length < 2;
  tools.querySelector("input").hidden = run.jobs.length < 9;
  tools.querySelector(".all").disabled = !hidden.size;
}

let before = [];
legend.addEventListener("click", event => {
  const button = event.target.closest("button[data-job]"), job = button && run.jobs[+button.dataset.job];
  if (!job) return;
  if (event.detail === 2) {  // its first click has changed what was shown
    hidden.clear();
    before.forEach(name => hidden.add(name));
  }
  before = [...hidden];
  if (event.shiftKey || event.altKey || event.detail === 2) solo(job.name);
  else if (!hidden.delete(job.name)) hidden.add(job.name);
  marked();
  redrawAll();
});
const light = event => {
  const about = event.target.closest && event.target.closest("button[data-job], tr[class]");
  const [style] = (about && about.className.match(/\bjob-\d+\b/)) || [];
  lit.textContent = style && (event.type === "pointerover" || event.type === "focusin") ? `.mark:not(.${CSS.escape(style)}){opacity:.12}` : "";
};
for (const place of [legend, ...document.querySelectorAll("[data-part=jobs],[data-part=sweep]")])
  for (const kind of ["pointerover", "pointerout", "focusin", "focusout"]) place.addEventListener(kind, light);

// --- tables ------------------------------------------------------------------------------------------------------------

const orders = new Map();  // by the part of the page that holds the table

function sortTables() {
  for (const table of document.querySelectorAll("table.sortable")) sortTable(table);
}

function sortTable(table) {
  const part = table.closest("[data-part]"), order = orders.get(part.dataset.part) || {column: -1, down: false};
  const by = (column, toggles = true) => {
    orders.set(part.dataset.part, {column, down: toggles && order.column === column && !order.down});
    sortTable(table);
  };
  const heads = [...table.querySelectorAll("thead th")];
  heads.forEach((head, at) => {
    const button = head.querySelector("button") || make("button", {type: "button", class: "sort"}, ...head.childNodes);
    button.onclick = () => by(at);
    head.append(button);
    if (at === order.column) head.setAttribute("aria-sort", order.down ? "descending" : "ascending"); else head.removeAttribute("aria-sort");
  });
  const select = part.querySelector(".sortby select") || make("select", {"aria-label": `Sort ${part.querySelector("h2").textContent.toLowerCase()} by`},
    make("option", {value: -1, disabled: true}, "as listed"), ...heads.map((head, at) => make("option", {value: at}, at ? head.textContent : "name")));
  select.onchange = () => by(+select.value, false);
  select.value = String(order.column);
  if (!select.isConnected) table.parentElement.before(make("label", {class: "sortby"}, "sorted by ", select));
  if (order.column < 0) return;
  const body = table.tBodies[0], key = row => order.column ? row.cells[order.column].dataset.key : row.dataset.key;
  const rows = [...body.rows].sort((a, b) => {
    const one = key(a), other = key(b);
    if (one === "" || other === "") return (one === "") - (other === "");  // what is not known comes last
    const difference = !isNaN(one) && !isNaN(other) ? one - other : one.localeCompare(other, "en", {numeric: true});
    return order.down ? -difference : difference;
  });
  body.append(...rows);
}

// --- all of it, and live -----------------------------------------------------------------------------------------------

const host = name => document.querySelector(`[data-chart=${name}]`);
take(first);
curves(host("curves"));
optimization(host("optimization"));
machineCharts(host("machine"));
const showSamples = samples(host("samples"));
function redrawAll() { redraw(); showSamples(); }
marked();
sortTables();
redrawAll();
NARROW.addEventListener("change", redrawAll);

const shown = new Map();
function put(parts) {
  for (const [name, html] of Object.entries(parts)) {
    if (shown.get(name) === html) continue;
    shown.set(name, html);
    if (name === "title") document.title = html;
    else if (name === "colours") document.querySelector("style.job-colours").textContent = html;
    else {
      const place = document.querySelector(`[data-part=${CSS.escape(name)}]`), at = [...place.querySelectorAll(".scroll")].map(one => one.scrollLeft);
      place.innerHTML = html;  // made and escaped by sections.py
      place.querySelectorAll(".scroll").forEach((one, number) => { one.scrollLeft = at[number] || 0; });
    }
  }
}

if (first.live) {
  const sign = make("p", {class: "live", role: "status"});
  document.querySelector("main").prepend(sign);
  let last = Date.now(), lost = false, timer = 0, busy = false;
  const say = () => {
    const seconds = Math.round((Date.now() - last) / 1000);
    sign.className = `live ${lost ? "lost" : ["running", "waiting"].includes(run.status) ? "on" : ""}`;
    sign.textContent = lost ? "packlora watch does not answer; the page shows what was known" : `live · ${seconds < 5 ? "up to date" : `looked ${duration(seconds)} ago`}`;
  };
  const ask = async () => {
    if (busy) return;
    busy = true;
    clearTimeout(timer);
    let wait = 2000;
    try {
      const answer = await fetch(`data?look=${run.look}`, {cache: "no-store"});
      if (!answer.ok) throw new Error(answer.status);
      const news = await answer.json();
      lost = false;
      last = Date.now();
      if (news.parts) {
        put(news.parts);
        take(news);
        marked();
        sortTables();
        redrawAll();
      }
      wait = ["running", "waiting", "broken off"].includes(run.status) ? 2000 : 5000;
    } catch { lost = true; wait = 5000; }
    busy = false;
    say();
    if (!document.hidden) timer = setTimeout(ask, wait);
  };
  setInterval(say, 1000);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
  say();
  timer = setTimeout(ask, 1000);
}
