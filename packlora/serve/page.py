"""The live page: figures of the service, asked for every two seconds. It names no session and no key."""

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>packlora serve</title>
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:3rem auto;padding:0 1rem}
td,th{padding:.1rem 1.5rem .1rem 0;text-align:left;white-space:nowrap}svg{vertical-align:middle;stroke:#47a;fill:none}
.bar{display:inline-block;height:.8rem;background:#47a;margin-right:2px}</style>
<h1>packlora serve</h1><table id="figures"></table><p>Share of each tenant in the last minute: <span id="shares"></span></p>
<h2>Models</h2><p id="none">None is listed. Where the service has keys, <code>packlora serve status</code> lists your own.</p>
<table id="training"></table><p><a href="metrics">metrics</a></p>
<script>
const named = {status: "Status", failure: "Failure", bases: "Bases", sessions: "Sessions", models: "Models",
  models_on_the_base: "Models with work", waiting_requests: "Requests that wait", samples: "Samples that run",
  tokens_per_second: "Trained tokens a second", sampled_per_second: "Sampled tokens a second",
  seconds: "Seconds since the start"};
const heads = ["", "Base", "Adapter", "Steps", "Loss of a token", "Waiting"];
function row(kind, cells) {
  const row = document.createElement("tr");
  for (const own of cells) { const cell = document.createElement(kind); cell.append(own); row.append(cell); }
  return row;
}
function curve(losses) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  const low = Math.min(...losses), high = Math.max(...losses), over = Math.max(losses.length - 1, 1);
  svg.setAttribute("width", 120); svg.setAttribute("height", 20);
  line.setAttribute("points", losses.map((loss, at) =>
    at * 118 / over + 1 + "," + (19 - (loss - low) / (high - low || 1) * 18)).join(" "));
  svg.append(line);
  return svg;
}
async function show() {
  try {
    const found = await (await fetch("status")).json(), own = found.training;
    document.title = "packlora serve";
    document.getElementById("figures").replaceChildren(...Object.entries(named).filter(([key]) => found[key] !== null).map(
      ([key, name]) => row("td", [name, key === "bases" ? Object.keys(found[key]).join(", ") : String(found[key])])));
    document.getElementById("shares").replaceChildren(...found.shares.map((share) => {
      const bar = document.createElement("span"); bar.className = "bar"; bar.style.width = share * 20 + "rem";
      bar.title = Math.round(share * 100) + " %"; return bar;
    }));
    document.getElementById("none").hidden = own.length > 0;
    document.getElementById("training").replaceChildren(...(own.length ? [row("th", heads)] : []), ...own.map((one, at) => {
      const loss = document.createElement("span");
      if (one.losses.length) loss.append(curve(one.losses), " " + one.losses.at(-1));
      return row("td", [String(at + 1), one.base, one.method + " r " + one.rank, String(one.steps), loss, String(one.waiting)]);
    }));
  } catch (error) { document.title = "packlora serve (no answer)"; }
}
show(); setInterval(show, 2000);
</script>
"""
