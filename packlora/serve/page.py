"""The live page: figures of the service, asked for every two seconds. It names no session and no key."""

PAGE = """<!doctype html><meta charset="utf-8"><title>packlora serve</title>
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:44rem;margin:3rem auto;padding:0 1rem}td{padding:.1rem 1.5rem .1rem 0}
.bar{display:inline-block;height:.8rem;background:#47a;margin-right:2px}</style>
<h1>packlora serve</h1><table id="figures"></table><p>Share of each tenant in the last minute: <span id="shares"></span></p>
<p><a href="metrics">metrics</a></p>
<script>
const named = {status: "Status", failure: "Failure", bases: "Bases", sessions: "Sessions", models: "Models",
  models_on_the_base: "Models with work", waiting_requests: "Requests that wait", samples: "Samples that run",
  tokens_per_second: "Trained tokens a second", seconds: "Seconds since the start"};
async function show() {
  try {
    const found = await (await fetch("status")).json(), table = document.getElementById("figures");
    table.replaceChildren(...Object.entries(named).filter(([key]) => found[key] !== null).map(([key, name]) => {
      const row = document.createElement("tr"), value = found[key];
      for (const text of [name, key === "bases" ? Object.keys(value).join(", ") : value]) {
        const cell = document.createElement("td"); cell.textContent = text; row.append(cell);
      }
      return row;
    }));
    document.getElementById("shares").replaceChildren(...found.shares.map((share) => {
      const bar = document.createElement("span"); bar.className = "bar"; bar.style.width = share * 20 + "rem";
      bar.title = Math.round(share * 100) + " %"; return bar;
    }));
  } catch (error) { document.title = "packlora serve (no answer)"; }
}
show(); setInterval(show, 2000);
</script>
"""
