"use strict";
// The curves of a run's page. Numbers come from the page itself and, while it is served live, from /data; names and texts of
// users reach the page as text alone (textContent), and the HTML of its other parts is made by sections.py.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const first = JSON.parse(document.querySelector("script.numbers").textContent);
  const LABELS = new Map([
    ["loss", "Loss, nats per token"], ["grad_norm", "Gradient norm before clipping"], ["lr", "Learning rate"],
    ["tokens_per_second", "Tokens per second of a step"], ["tokens", "Tokens of a step"], ["seconds", "Seconds of a step"],
  ]);
  const PLACES = {step: "optimizer step of the job", seen: "tokens trained on", time: "time since the start"};
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

  const run = {look: -1, epoch: -1, jobs: [], machine: null, ranks: 1, status: ""};
  const hidden = new Set();
  /** By job, in the order of the page: columns of its steps and evaluations, generated texts, what is drawn of it. */
  let series = [];

  const blank = () => ({steps: null, evals: null, samples: [], version: 0, smooth: new Map()});

  /** Put new columns behind the known ones; the last ones may have grown. */
  function spliced(old, news) {
    if (!news) return old;
    const columns = {places: {}, mean: new Map(), low: new Map(), high: new Map(), every: news.every, count: []};
    const keep = old && news.from ? news.from : 0, added = news.count.length;
    const joined = (before, after) => {
      const head = before ? before.slice(0, keep) : [];
      while (head.length < keep) head.push(null);
      return head.concat(after || new Array(added).fill(null));
    };
    columns.count = joined(old && old.count, news.count);
    for (const name of ["step", "time", "seen"]) if (news[name]) columns.places[name] = joined(old && old.places[name], news[name]);
    for (const kind of ["mean", "low", "high"]) {
      const own = new Map(Object.entries(news[kind] || {}));
      const before = old ? old[kind] : new Map();
      for (const key of new Set([...before.keys(), ...own.keys()])) columns[kind].set(key, joined(before.get(key), own.get(key)));
    }
    return columns;
  }

  function take(news) {
    if (news.whole) { series = []; run.machine = null; }
    run.look = news.look; run.epoch = news.epoch; run.jobs = news.jobs; run.ranks = news.ranks; run.status = news.status;
    while (series.length < run.jobs.length) series.push(blank());
    for (const one of news.series) {
      const own = series[one.job];
      own.steps = spliced(own.steps, one.steps);
      own.evals = spliced(own.evals, one.evals);
      if (one.samples) own.samples = one.samples;
      own.version++;
      own.smooth.clear();
    }
    run.machine = spliced(run.machine, news.machine);
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

  // --- a chart -----------------------------------------------------------------------------------------------------------

  const zooms = {};  // by the kind of place, so that charts of one kind show the same stretch
  const charts = [];
  const redraw = () => charts.forEach(chart => chart.update());

  class Scale {
    constructor(low, high, size, log) {
      this.low = low; this.high = high; this.size = size; this.log = log;
    }
    at(value) {
      if (!this.log) return this.size * (value - this.low) / (this.high - this.low);
      return this.size * (Math.log10(Math.max(value, 1e-300)) - Math.log10(this.low)) / (Math.log10(this.high) - Math.log10(this.low));
    }
    back(place) {
      const share = place / this.size;
      if (!this.log) return this.low + share * (this.high - this.low);
      return 10 ** (Math.log10(this.low) + share * (Math.log10(this.high) - Math.log10(this.low)));
    }
    /** [value, text] of round numbers. */
    ticks(count, whole) {
      if (this.log) return this.decades(count);
      const least = (this.high - this.low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(least));
      let step = [1, 2, 5, 10].find(factor => factor * power >= least * (1 - 1e-9)) * power;
      if (whole) step = Math.max(1, step);
      const out = [];
      for (let at = Math.ceil(this.low / step - 1e-9); at <= Math.floor(this.high / step + 1e-9) && out.length < 50; at++)
        out.push([at * step, tickText(at * step, step)]);
      return out;
    }
    decades(count) {
      const span = Math.log10(this.high / this.low), out = [];
      const factors = span > 3 ? [1] : span > 1.2 ? [1, 3] : [1, 1.5, 2, 3, 4, 5, 6, 8];
      const stride = Math.max(1, Math.round(span / count));
      for (let power = Math.floor(Math.log10(this.low)); power <= Math.log10(this.high) && out.length < 60; power += span > 3 ? stride : 1)
        for (const factor of factors) {
          const value = factor * 10 ** power;
          if (value >= this.low * (1 - 1e-9) && value <= this.high * (1 + 1e-9))
            out.push([value, value >= 1e5 || value < 1e-3 ? value.toExponential(0).replace("e-", "e−").replace("e+", "e") : `${+value.toPrecision(2)}`]);
        }
      return out.length > 1 ? out : [[this.low, number(this.low)], [this.high, number(this.high)]];
    }
  }

  /**
   * A chart of lines over one kind of place. content() gives {title, unit, place, log, zero, lines, format}; a line is
   * {job, name, style, xs, ys, faint, low, high, dots, cross, stack}.
   */
  class Chart {
    constructor(host, height, content) {
      this.height = height; this.content = content; this.drag = null; this.pointer = null; this.yZoom = null;
      this.title = make("b"); this.unit = make("span"); this.keys = make("span", {class: "keys"});
      this.reset = make("button", {type: "button", class: "reset", hidden: true, onclick: () => this.zoom(null, null)}, "whole range");
      this.box = make("div", {class: "canvas", tabindex: "0", role: "img"});
      this.svg = draw("svg", {}, this.box);
      this.tip = make("div", {class: "tip", hidden: true});
      this.box.append(this.tip);
      this.figure = make("figure", {class: "curve"}, make("figcaption", {}, this.title, " ", this.unit, this.keys, this.reset), this.box);
      host.append(this.figure);
      const on = (kind, does) => this.box.addEventListener(kind, does);
      on("pointerdown", event => this.press(event));
      on("pointermove", event => this.move(event));
      on("pointerup", event => this.release(event));
      on("pointercancel", () => { this.drag = null; this.hover(); });
      on("pointerleave", () => { if (!this.drag) { this.pointer = null; this.hover(); } });
      on("dblclick", () => this.zoom(null, null));
      on("keydown", event => this.key(event));
      new ResizeObserver(() => this.update()).observe(this.box);
      charts.push(this);
    }

    get range() { return zooms[this.shown.place] || null; }

    zoom(x, y) {
      this.yZoom = y;
      zooms[this.shown.place] = x;
      redraw();
    }

    update() {
      const shown = this.shown = this.content();
      this.figure.hidden = !shown || !shown.lines.length;
      if (this.figure.hidden) return;
      this.title.textContent = shown.title; this.unit.textContent = shown.unit || "";
      this.box.setAttribute("aria-label", `${shown.title}: ${shown.lines.map(line => line.name).join(", ")}`);
      const named = shown.lines.filter(line => line.job == null);
      this.keys.replaceChildren(...(named.length > 1 ? named.map(line => make("span", {class: `name ${line.style}`}, line.name)) : []));
      this.reset.hidden = !this.range && !this.yZoom;
      const width = this.box.clientWidth;
      if (!width) return;
      this.left = NARROW.matches ? 44 : 54; this.right = 12; this.top = 8; this.bottom = 26;
      this.scales(width - this.left - this.right, this.height - this.top - this.bottom);
      this.paint(width);
      this.hover();
    }

    scales(width, height) {
      const {lines, log, zero, robust} = this.shown, range = this.range;
      let low = Infinity, high = -Infinity;
      for (const {xs} of lines) if (xs.length) { low = Math.min(low, xs[0]); high = Math.max(high, xs[xs.length - 1]); }
      if (!finite(low)) { low = 0; high = 1; }
      if (low > 0) low = Math.min(low, this.shown.origin ?? 0);
      if (high <= low) high = low + 1;
      const [left, right] = range || [low, high];
      this.x = new Scale(left, right, width, false);
      let values = [], firm = [];
      for (const line of lines) {
        const from = Math.max(0, placeOf(line.xs, left) - 1), to = Math.min(line.xs.length, placeOf(line.xs, right) + 1);
        for (let at = from; at < to; at++) {
          const value = line.stack ? line.stack[at] : line.ys[at];
          if (finite(value) && (!log || value > 0)) firm.push(value);
          const faint = line.faint && line.faint[at];
          if (finite(faint) && (!log || faint > 0)) values.push(faint);
        }
      }
      if (robust !== false && values.length > 20) {  // a spike of one in a hundred does not flatten the rest
        values.sort((a, b) => a - b);
        const margin = Math.ceil(values.length / 100);
        values = values.slice(margin, values.length - margin);
      }
      let bottom = Infinity, top = -Infinity;
      for (const value of firm) { if (value < bottom) bottom = value; if (value > top) top = value; }
      for (const value of values) { if (value < bottom) bottom = value; if (value > top) top = value; }
      if (!finite(bottom)) { bottom = log ? 0.1 : 0; top = 1; }
      if (this.yZoom) [bottom, top] = this.yZoom;
      else if (log) { const edge = Math.max(1.02, (top / bottom) ** 0.04); bottom /= edge; top *= edge; }
      else {
        if (zero) bottom = Math.min(0, bottom);
        const edge = (top - bottom || Math.abs(top) || 1) * 0.05;
        bottom -= zero && bottom === 0 ? 0 : edge; top += edge;
      }
      this.y = new Scale(bottom, top, height, log);
    }

    px(x) { return this.left + this.x.at(x); }
    py(y) { return this.top + this.y.size - this.y.at(y); }

    paint(width) {
      const svg = this.svg, {lines} = this.shown, right = this.left + this.x.size, foot = this.top + this.y.size;
      svg.replaceChildren();
      svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
      svg.setAttribute("width", width); svg.setAttribute("height", this.height);
      const clip = `clip-${charts.indexOf(this)}`;
      draw("rect", {x: this.left - 6, y: this.top - 6, width: this.x.size + 12, height: this.y.size + 10}, draw("clipPath", {id: clip}, draw("defs", {}, svg)));
      const grid = draw("g", {class: "axes"}, svg);
      for (const [value, text] of this.y.ticks(this.y.size / 46)) {
        const y = this.py(value).toFixed(1);
        draw("path", {class: "grid", d: `M${this.left},${y}H${right}`}, grid);
        draw("text", {x: this.left - 8, y, "text-anchor": "end", dy: "0.32em"}, grid).textContent = this.shown.tick ? this.shown.tick(value) : text;
      }
      const span = this.x.high - this.x.low, isTime = this.shown.place === "time";
      const unit = isTime ? (span > 7200 ? 3600 : span > 180 ? 60 : 1) : 1;
      const inUnit = new Scale(this.x.low / unit, this.x.high / unit, this.x.size, false);
      const ticks = inUnit.ticks(this.x.size / 90, this.shown.place === "step");
      for (const [value, text] of ticks)
        draw("text", {x: this.px(value * unit).toFixed(1), y: foot + 18, "text-anchor": "middle"}, grid).textContent = text;
      draw("path", {class: "base", d: `M${this.left},${foot}H${right}`}, grid);
      const label = isTime ? `${{3600: "hours", 60: "minutes", 1: "seconds"}[unit]} since the start` : PLACES[this.shown.place] || "";
      this.unit.textContent = [this.shown.unit, label && `over ${label}`].filter(Boolean).join(" · ");
      this.marks = draw("g", {"clip-path": `url(#${clip})`}, svg);
      for (const line of lines) this.line(line);
      this.cross = draw("path", {class: "cross", d: ""}, svg);
      this.picked = draw("g", {}, svg);
      this.frame = draw("rect", {class: "frame", width: 0, height: 0}, svg);
    }

    /** Points in view as one path, at most a lowest and a highest for each pixel. */
    path(xs, ys) {
      const from = Math.max(0, placeOf(xs, this.x.low) - 1), to = Math.min(xs.length, placeOf(xs, this.x.high) + 1);
      const size = Math.max(1, Math.ceil((to - from) / (2 * this.x.size)));
      let out = "", pen = "M";
      for (let start = from; start < to; start += 2 * size) {
        const chosen = [];
        if (size === 1) chosen.push(start, start + 1);
        else {
          let least = -1, most = -1;
          for (let at = start; at < Math.min(to, start + 2 * size); at++) {
            if (!finite(ys[at])) continue;
            if (least < 0 || ys[at] < ys[least]) least = at;
            if (most < 0 || ys[at] > ys[most]) most = at;
          }
          chosen.push(...(least < most ? [least, most] : [most, least]));
        }
        for (const at of chosen) {
          if (at < 0 || at >= to) continue;
          if (!finite(ys[at]) || (this.y.log && ys[at] <= 0)) { pen = "M"; continue; }
          out += `${pen}${this.px(xs[at]).toFixed(1)},${this.py(ys[at]).toFixed(1)}`;
          pen = "L";
        }
      }
      return out;
    }

    line(line) {
      const mark = `mark ${line.style}`;
      const known = {"data-job": line.job ?? "", "data-kind": line.kind || "line"};
      if (line.floor) {
        const up = [], down = [];
        line.xs.forEach((x, at) => { up.push(`${this.px(x).toFixed(1)},${this.py(line.stack[at]).toFixed(1)}`); down.push(`${this.px(x).toFixed(1)},${this.py(line.floor[at]).toFixed(1)}`); });
        draw("path", {...known, class: `${mark} area`, d: up.length ? `M${up.join("L")}L${down.reverse().join("L")}Z` : ""}, this.marks);
        return;
      }
      if (line.low) draw("path", {...known, class: `${mark} band`, d: this.band(line)}, this.marks);
      if (line.faint) draw("path", {...known, "data-kind": "raw", class: `${mark} faint`, d: this.path(line.xs, line.faint)}, this.marks);
      const d = this.path(line.xs, line.ys);
      if (!line.dots || line.xs.length > 1) draw("path", {...known, class: `${mark} ${line.dots ? "thread" : "bold"}`, d}, this.marks);
      if (!line.dots && line.ys.filter(finite).length === 1) draw("path", {...known, class: `${mark} dot`, d: d + "h0"}, this.marks);
      if (line.dots) for (const kind of ["ring", ""]) {
        const dots = line.xs.map((x, at) => finite(line.ys[at]) && (!this.y.log || line.ys[at] > 0) ? `M${this.px(x).toFixed(1)},${this.py(line.ys[at]).toFixed(1)}h0` : "").join("");
        draw("path", {...known, class: `${mark} dot ${kind}`, d: dots}, this.marks);
      }
      if (line.cross) {
        let at = line.ys.length - 1;
        while (at >= 0 && !finite(line.ys[at])) at--;
        if (at >= 0) draw("text", {...known, "data-kind": "failed", class: `${mark} failed`, x: this.px(line.xs[at]), y: this.py(line.ys[at]), "text-anchor": "middle", dy: "0.36em"}, this.marks).textContent = "✕";
      }
    }

    band({xs, low, high}) {
      const there = xs.map((_, at) => at).filter(at => finite(low[at]) && finite(high[at]) && (!this.y.log || low[at] > 0));
      const side = (ys, at) => `${this.px(xs[at]).toFixed(1)},${this.py(ys[at]).toFixed(1)}`;
      if (!there.length) return "";
      return `M${there.map(at => side(high, at)).join("L")}L${there.reverse().map(at => side(low, at)).join("L")}Z`;
    }

    // the pointer: a drag zooms, everything else shows the values of all lines

    where(event) {
      const box = this.box.getBoundingClientRect();
      const inside = (value, size) => Math.min(size, Math.max(0, value));
      return [inside(event.clientX - box.left - this.left, this.x.size), inside(event.clientY - box.top - this.top, this.y.size)];
    }

    press(event) {
      if (event.button || !this.x) return;
      this.drag = {from: this.where(event), to: null};
      this.box.setPointerCapture(event.pointerId);
    }

    move(event) {
      if (!this.x) return;
      const [x, y] = this.where(event);
      this.pointer = [x, y];
      if (this.drag) { this.drag.to = [x, y]; this.select(); }
      this.hover();
    }

    /** The stretch that is being dragged over: along one axis, or a box. */
    select() {
      const {from, to} = this.drag;
      const wide = Math.abs(to[0] - from[0]) > 8, tall = Math.abs(to[1] - from[1]) > 40 || (!wide && Math.abs(to[1] - from[1]) > 12);
      const [x0, x1] = wide ? [from[0], to[0]].sort((a, b) => a - b) : [0, this.x.size];
      const [y0, y1] = tall ? [from[1], to[1]].sort((a, b) => a - b) : [0, this.y.size];
      this.drag.box = wide || tall ? {wide, tall, x0, x1, y0, y1} : null;
      const box = this.drag.box || {x0: 0, x1: 0, y0: 0, y1: 0};
      for (const [name, value] of Object.entries({x: this.left + box.x0, y: this.top + box.y0, width: box.x1 - box.x0, height: box.y1 - box.y0}))
        this.frame.setAttribute(name, value);
    }

    release() {
      const box = this.drag && this.drag.box;
      this.drag = null;
      if (!box) return;
      const x = box.wide ? [this.x.back(box.x0), this.x.back(box.x1)] : this.range;
      const y = box.tall ? [this.y.back(this.y.size - box.y1), this.y.back(this.y.size - box.y0)] : this.yZoom;
      this.zoom(x, y);
    }

    key(event) {
      const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
      if (event.key === "Escape") this.zoom(null, null);
      if (!step || !this.x) return;
      event.preventDefault();
      const xs = this.shown.lines.reduce((most, line) => line.xs.length > most.length ? line.xs : most, []);
      if (!xs.length) return;
      const at = this.pointer ? nearest(xs, this.x.back(this.pointer[0])) + step : 0;
      this.pointer = [this.x.at(xs[Math.min(xs.length - 1, Math.max(0, at))]), 0];
      this.hover();
    }

    hover() {
      if (!this.x || !this.tip) return;
      this.picked.replaceChildren();
      this.tip.hidden = !this.pointer || Boolean(this.drag && this.drag.box);
      this.cross.setAttribute("d", "");
      if (this.tip.hidden) return;
      const x = this.x.back(this.pointer[0]), rows = [];
      let place = null;
      for (const line of this.shown.lines) {
        if (!line.xs.length || x > line.xs[line.xs.length - 1] + (this.x.high - this.x.low) * 0.02) continue;
        const at = nearest(line.xs, x), value = line.ys[at];
        if (!finite(value) || line.xs[at] < this.x.low || line.xs[at] > this.x.high) continue;
        if (!line.dots && (place === null || Math.abs(line.xs[at] - x) < Math.abs(place - x))) place = line.xs[at];
        rows.push({line, at, value});
      }
      if (!rows.length) { this.tip.hidden = true; return; }
      if (place === null) place = rows[0].line.xs[rows[0].at];
      const px = this.px(place);
      this.cross.setAttribute("d", `M${px.toFixed(1)},${this.top}V${this.top + this.y.size}`);
      this.fill(rows, place);
      for (const {line, at, value} of rows) {
        const y = this.py(line.stack ? line.stack[at] : value);
        if (y >= this.top - 4 && y <= this.top + this.y.size + 4)
          draw("circle", {class: `pick ${line.style}`, cx: this.px(line.xs[at]), cy: y, r: 3.5}, this.picked);
      }
      const room = this.box.clientWidth, width = this.tip.offsetWidth;
      const left = px + 16 + width > room && px - 16 - width > 0 ? px - 16 - width : Math.min(px + 16, Math.max(0, room - width));
      this.tip.style.left = `${left}px`;
      this.tip.style.top = `${Math.min(this.top, 8)}px`;
    }

    /** A row for each job: its mean, the value itself, the held-out value before. */
    fill(rows, place) {
      const {format = number, placeText} = this.shown, byKey = new Map();
      for (const {line, at, value} of rows) {
        const key = line.job ?? line.name;
        const row = byKey.get(key) || {line, value: null, raw: null, held: null};
        if (line.dots) row.held = [value, line.xs[at]];
        else { row.value = value; row.line = line; row.raw = line.faint ? line.faint[at] : null; row.low = line.low && line.low[at]; row.high = line.high && line.high[at]; }
        byKey.set(key, row);
      }
      const sorted = [...byKey.values()].sort((a, b) => (b.value ?? b.held[0]) - (a.value ?? a.held[0]));
      const most = NARROW.matches ? 8 : 24, shown = sorted.slice(0, most);
      const hasRaw = shown.some(row => row.raw != null), hasHeld = shown.some(row => row.held);
      const head = make("tr", {}, make("th", {}, placeText(place)), make("th", {}, hasRaw ? "mean" : ""),
        hasRaw ? make("th", {}, "step") : null, hasHeld ? make("th", {}, "held-out") : null);
      const body = shown.map(row => make("tr", {class: row.line.style, "data-job": row.line.job ?? ""},
        make("td", {}, make("span", {class: "name"}, row.line.name)),
        make("td", {}, row.value == null ? "" : format(row.value)),
        hasRaw ? make("td", {class: "soft"}, row.low != null ? `${format(row.low)} to ${format(row.high)}` : row.raw == null ? "" : format(row.raw)) : null,
        hasHeld ? make("td", {}, row.held ? format(row.held[0]) : "") : null));
      this.tip.replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)),
        sorted.length > most ? make("p", {}, `and ${sorted.length - most} more`) : "");
    }
  }

  // --- learning curves ---------------------------------------------------------------------------------------------------

  const chosen = {metric: "loss", place: "step", log: false, share: 0.07};
  const visible = () => run.jobs.map((job, at) => ({job, at, own: series[at]})).filter(({at, own}) => own && !hidden.has(run.jobs[at].name));
  const placeText = place => value => place === "time" ? duration(value) : place === "step" ? `step ${Math.round(value).toLocaleString("en")}` : `${Math.round(value).toLocaleString("en")} tokens`;

  /** Curves of a metric, and dots of what evaluations found of it. */
  function learning(metric, place, share) {
    const lines = [];
    for (const {job, at, own} of visible()) {
      const mean = own.steps && own.steps.mean.get(metric);
      if (mean) {
        const low = own.steps.low.get(metric), high = own.steps.high.get(metric);
        lines.push({
          job: at, name: job.name, style: job.style, xs: own.steps.places[place], ys: share ? smoothed(own, metric, share) : mean,
          faint: share ? mean : null, low, high, cross: job.status === "failed",
        });
      }
    }
    for (const {job, at, own} of visible()) {
      const found = own.evals && own.evals.mean.get(metric);
      if (!found) continue;
      const xs = own.evals.places.step.map(step => place === "step" ? step : own.steps ? between(own.steps.places.step, own.steps.places[place], step) : 0);
      lines.push({job: at, name: job.name, style: job.style, xs, ys: found, dots: true, kind: "held-out"});
    }
    return lines;
  }

  function curves(host) {
    const metric = make("select", {"aria-label": "Metric", onchange: () => { chosen.metric = metric.value; chart.yZoom = null; redraw(); }});
    const place = make("select", {"aria-label": "Horizontal axis", onchange: () => { chosen.place = place.value; redraw(); }},
      ...Object.entries({step: "by step", seen: "by tokens", time: "by time"}).map(([value, text]) => make("option", {value}, text)));
    const log = make("input", {type: "checkbox", onchange: () => { chosen.log = log.checked; chart.yZoom = null; redraw(); }});
    const told = make("output", {});
    const smooth = make("input", {type: "range", min: 0, max: 30, step: 1, value: 7, "aria-label": "Smoothing", oninput: () => { chosen.share = smooth.value / 100; tell(); redraw(); }});
    const tell = () => { told.textContent = chosen.share ? `${smooth.value} %` : "off"; };
    tell();
    const controls = make("div", {class: "controls"}, metric, place, make("label", {class: "check"}, log, "log axis"),
      make("label", {class: "slide"}, "smoothing", smooth, told));
    const caption = make("p", {class: "caption"});
    const section = make("section", {class: "curves"}, make("h2", {}, "Learning curves"), controls);
    host.append(section);
    const chart = new Chart(section, NARROW.matches ? 280 : 400, () => {
      const names = metrics();
      if (names.join() !== [...metric.options].map(option => option.value).join()) {
        metric.replaceChildren(...names.map(name => make("option", {value: name}, LABELS.get(name) || name)));
        metric.value = names.includes(chosen.metric) ? chosen.metric : "loss";
      }
      const lines = learning(metric.value, chosen.place, chosen.share);
      section.hidden = !series.some(own => own.steps || own.evals);
      const every = Math.max(1, ...lines.map(line => line.dots ? 1 : series[line.job].steps.every));
      caption.textContent = [
        chosen.share ? `Bold: running mean over ${smooth.value} % of a job's steps; light: ${every > 1 ? `groups of up to ${every} steps, and between their lowest and highest values` : "every step"}.` : "",
        lines.some(line => line.dots) ? "Dots: held-out." : "", lines.some(line => line.cross) ? "✕: the job failed." : "",
        NARROW.matches ? "" : "Drag to zoom, double-click for the whole range.",
      ].join(" ");
      return {title: LABELS.get(metric.value) || metric.value, place: chosen.place, log: chosen.log, lines, placeText: placeText(chosen.place), zero: metric.value === "lr"};
    });
    section.append(caption);
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
      use: [{name: "microbatches full", style: "hue-0", xs, ys: fill}, {name: "time outside of them", style: "hue-1", xs, ys: busy}],
    };
  }

  function machineCharts(host) {
    const section = make("section", {}, make("h2", {}, "Throughput and memory")), pair = make("div", {class: "pair three"});
    const caption = make("p", {class: "caption"}, "Microbatches full: their tokens, as a share of what they can hold. Time outside of them: evaluations, generated samples, checkpoints, and waiting for the schedule.");
    section.append(pair, caption);
    host.append(section);
    const text = placeText("time");
    new Chart(pair, 200, () => {
      const lines = throughput();
      section.hidden = !series.some(own => own.steps);
      caption.hidden = !run.machine;
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
    for (const row of document.querySelectorAll("[data-part=jobs] tbody tr")) row.classList.toggle("off", hidden.has(row.dataset.key));
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
    const button = event.target.closest && event.target.closest("button[data-job], tr[id^=job-]");
    const style = button && (button.id || button.className.split(" ")[0]);
    lit.textContent = style && (event.type === "pointerover" || event.type === "focusin") ? `.mark:not(.${CSS.escape(style)}){opacity:.12}` : "";
  };
  for (const place of [legend, document.querySelector("[data-part=jobs]")])
    for (const kind of ["pointerover", "pointerout", "focusin", "focusout"]) place.addEventListener(kind, light);

  // --- the table of jobs -------------------------------------------------------------------------------------------------

  const order = {column: -1, down: false};

  function sortJobs() {
    const table = document.querySelector("[data-part=jobs] table");
    if (!table) return;
    const heads = [...table.querySelectorAll("thead th")];
    heads.forEach((head, at) => {
      if (!head.querySelector("button")) {
        const button = make("button", {type: "button", class: "sort"}, ...head.childNodes);
        button.addEventListener("click", () => by(at));
        head.append(button);
      }
      if (at === order.column) head.setAttribute("aria-sort", order.down ? "descending" : "ascending"); else head.removeAttribute("aria-sort");
    });
    if (!table.parentElement.parentElement.querySelector(".sortby")) {
      const select = make("select", {"aria-label": "Sort jobs by", onchange: () => by(+select.value, false)},
        ...heads.map((head, at) => make("option", {value: at}, at ? head.textContent : "name")));
      select.value = String(Math.max(0, order.column));
      table.parentElement.before(make("label", {class: "sortby"}, "sorted by ", select));
    }
    if (order.column < 0) return;
    const body = table.tBodies[0];
    const key = row => order.column ? row.cells[order.column].dataset.key : row.dataset.key;
    const rows = [...body.rows].sort((a, b) => {
      const one = key(a), other = key(b);
      if (one === "" || other === "") return (one === "") - (other === "");  // what is not known comes last
      const difference = !isNaN(one) && !isNaN(other) ? one - other : one.localeCompare(other, "en", {numeric: true});
      return order.down ? -difference : difference;
    });
    body.append(...rows);
  }

  function by(column, toggles = true) {
    order.down = toggles && order.column === column && !order.down;
    order.column = column;
    sortJobs();
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
  sortJobs();
  redrawAll();
  NARROW.addEventListener("change", redrawAll);

  function put(parts) {
    for (const [name, html] of Object.entries(parts)) {
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
        const answer = await fetch(`data?look=${run.look}&epoch=${run.epoch}`, {cache: "no-store"});
        if (!answer.ok) throw new Error(answer.status);
        const news = await answer.json(), isNew = news.look !== run.look || news.epoch !== run.epoch;
        lost = false;
        last = Date.now();
        if (isNew) {
          put(news.parts);
          take(news);
          marked();
          sortJobs();
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
})();
