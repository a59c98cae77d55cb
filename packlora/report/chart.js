// A chart of lines: scales, marks, the pointer, and the picture and the table that a reader takes away.
const zooms = {};  // by the kind of place, so that charts of one kind show the same stretch
const charts = [];
const redraw = () => { for (const chart of charts) chart.update(); };  // also those that the first ones make

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
    const takes = [["PNG", () => this.picture()], ["CSV", () => this.table()]].map(([kind, does]) => make("button", {type: "button", class: "take", title: `save as ${kind}`, onclick: does}, kind));
    this.figure = make("figure", {class: "curve"}, make("figcaption", {}, this.title, " ", this.unit, this.keys, make("span", {class: "takes"}, this.reset, ...takes)), this.box);
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
    this.height = shown.height || this.height;
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
    this.axes = grid;
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

  // what a reader takes away

  save(blob, ending) {
    const name = `${document.title.split(" · ")[0]} ${this.shown.title}`.replace(/[^\w.-]+/g, "-"), url = URL.createObjectURL(blob);
    make("a", {href: url, download: `${name}.${ending}`}).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  /** All values that are drawn, before smoothing; of groups of steps the mean, the lowest and the highest. */
  table() {
    const text = value => { const safe = /^[=+@-]/.test(value) ? `'${value}` : `${value}`; return /[",\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe; };
    const rows = [["line", "kind", this.shown.place, this.shown.title, "lowest", "highest"].map(text)];
    for (const {name, kind, xs, ys, faint, low, high} of this.shown.lines)
      xs.forEach((x, at) => {
        const value = (faint || ys)[at];
        if (finite(value)) rows.push([text(name), kind || "", x, value, low ? low[at] : "", high ? high[at] : ""]);
      });
    this.save(new Blob([rows.map(row => row.join(",")).join("\n") + "\n"], {type: "text/csv"}), "csv");
  }

  /** The chart at twice its size, under its title and the names of its lines. */
  picture() {
    const names = new Map(this.shown.lines.map(line => [line.name, line.style])), width = this.box.clientWidth, row = 20;
    const canvas = make("canvas"), pen = canvas.getContext("2d"), body = getComputedStyle(document.body), places = [];
    const font = weight => { pen.font = `${weight} 13px ${body.fontFamily}`; };
    let x = 12, y = 48;
    font(400);
    for (const [name, style] of names) {
      const wide = pen.measureText(name).width + 34;
      if (x > 12 && x + wide > width) { x = 12; y += row; }
      places.push([name, style, x, y]);
      x += wide;
    }
    canvas.width = 2 * width; canvas.height = 2 * (y + 12 + this.height);
    pen.scale(2, 2);
    pen.fillStyle = body.backgroundColor; pen.fillRect(0, 0, width, y + 12 + this.height);
    pen.fillStyle = body.color; font(650); pen.fillText(this.shown.title, 12, 24);
    const after = 12 + pen.measureText(`${this.shown.title}  `).width;
    font(400); pen.fillText(this.unit.textContent, after, 24);
    for (const [name, style, left, foot] of places) {
      const sample = draw("g", {class: style}, this.svg);
      pen.fillStyle = getComputedStyle(sample).getPropertyValue("--ink"); pen.fillRect(left, foot - 10, 11, 11);
      sample.remove();
      pen.fillStyle = body.color; pen.fillText(name, left + 17, foot);
    }
    pen.translate(0, y + 12);
    for (const mark of this.axes.children) paint(pen, mark);
    pen.beginPath(); pen.rect(this.left - 6, this.top - 6, this.x.size + 12, this.y.size + 10); pen.clip();
    for (const mark of this.marks.children) paint(pen, mark);
    canvas.toBlob(blob => this.save(blob, "png"));
  }
}

/** A text or a path of a chart on a canvas, as the style sheet draws it. */
function paint(pen, mark) {
  const look = getComputedStyle(mark), d = mark.getAttribute("d");
  pen.globalAlpha = +look.opacity;
  if (mark.tagName === "text") {
    pen.font = `${look.fontWeight} ${look.fontSize} ${look.fontFamily}`; pen.fillStyle = look.fill;
    pen.textAlign = {middle: "center", end: "right"}[mark.getAttribute("text-anchor")]; pen.textBaseline = mark.hasAttribute("dy") ? "middle" : "alphabetic";
    pen.fillText(mark.textContent, mark.getAttribute("x"), mark.getAttribute("y"));
  } else if (mark.classList.contains("dot")) {  // a stroke of no length, which a canvas leaves out
    pen.fillStyle = look.stroke;
    for (const [, x, y] of d.matchAll(/M([\d.-]+),([\d.-]+)h0/g)) { pen.beginPath(); pen.arc(+x, +y, parseFloat(look.strokeWidth) / 2, 0, 7); pen.fill(); }
  } else {
    const path = new Path2D(d);
    if (look.fill !== "none") { pen.fillStyle = look.fill; pen.fill(path); }
    if (look.stroke === "none") return;
    pen.strokeStyle = look.stroke; pen.lineWidth = parseFloat(look.strokeWidth); pen.lineJoin = "round";
    pen.setLineDash(look.strokeDasharray === "none" ? [] : look.strokeDasharray.split(/[ ,]+/).map(parseFloat));
    pen.stroke(path);
  }
}
