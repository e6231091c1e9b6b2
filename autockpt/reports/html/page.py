"""How the page looks and moves: one style sheet, one script, one shell.  No content lives here.

The page is one file, asks no network for anything, and is complete without its script; a content
security policy names the one script by its hash, so injected markup could not run even if there
were any.  Colours come in pairs for light and dark; print is always light and opens what is folded.
"""

import base64
import hashlib
from collections.abc import Sequence

from autockpt.reports.analysis import what_if
from autockpt.reports.html.escape import Html, join, tag

CSS = """
:root{color-scheme:light dark;--ink:light-dark(#1a1f26,#e4e8ec);--soft:light-dark(#5a6472,
  #9aa5b1);--paper:light-dark(#fff,#13171c);--panel:light-dark(#f5f7f9,#1b2128);
  --line:light-dark(#dde2e8,#2e3640);--accent:light-dark(#1f5f8b,#6db3e0);
  --good:light-dark(#1d7a4c,#58c08b);--warn:light-dark(#9a6200,#e0ac4a);--bad:light-dark(#b3261e,
  #f2867e);--c-productive:light-dark(#2b6a8f,#35779d);--c-stall:light-dark(#e0a030,#dba33f);
  --c-slowdown:light-dark(#ecd08a,#bfa460);--c-lost:light-dark(#b0416b,#b54d77);
  --c-down:light-dark(#67509b,#7b64b3);--c-other:light-dark(#c3c9d0,#59636e);
  --c-copy:light-dark(#e0a030,#e3ae4e);--c-persist:light-dark(#2e8f6b,#4bb18b);
  --c-train:light-dark(#d5e4ee,#263a49);--memory:light-dark(#1f5f8b,#6db3e0);
  --disk:light-dark(#2e8f6b,#56bd95)}
*{box-sizing:border-box} html{scroll-behavior:smooth;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,
  "Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums}
.wrap{max-width:1040px;margin:0 auto;padding:0 28px} .skip{position:absolute;left:-999px}
.skip:focus{left:12px;top:12px;background:var(--paper);padding:8px 14px;z-index:2}
a{color:var(--accent);text-underline-offset:3px}
:focus-visible{outline:2px solid var(--accent);outline-offset:3px;border-radius:3px}
header.wrap{padding-top:44px}
.eyebrow{color:var(--soft);font-size:13px;letter-spacing:.06em;text-transform:uppercase;margin:0}
h1{font-size:30px;line-height:1.2;margin:2px 0 10px;letter-spacing:-.015em;overflow-wrap:anywhere}
h2{font-size:20px;line-height:1.3;margin:0 0 6px;letter-spacing:-.01em}
h3{font-size:15px;margin:26px 0 8px} p{margin:0 0 12px;max-width:74ch} .lead{color:var(--soft)}
.facts{display:flex;flex-wrap:wrap;gap:4px 26px;margin:0 0 14px;font-size:14px}
.facts div{display:flex;gap:7px;min-width:0} .facts dt{color:var(--soft)}
.facts dd{margin:0;overflow-wrap:anywhere} .next{font-size:15px}
nav ul,.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 20px;padding:0;margin:0;
  font-size:14px}
nav{border-top:1px solid var(--line);border-bottom:1px solid var(--line);padding:9px 0;
  margin:18px 0 26px}
nav a{text-decoration:none} nav a:hover{text-decoration:underline} section{margin:0 0 54px}
.verdict{background:var(--panel);border-left:5px solid var(--good);
  border-radius:4px 10px 10px 4px;padding:24px 28px 18px;margin-bottom:14px}
.verdict.warn{border-color:var(--warn)} .verdict.bad{border-color:var(--bad)}
.verdict h2{font-size:25px;line-height:1.28;max-width:34em;text-wrap:balance;margin-bottom:10px}
.verdict p{margin-bottom:8px}
.banner{border:2px solid var(--bad);border-radius:10px;padding:20px 26px 14px;margin-bottom:18px}
.banner h2{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;
  margin:0 0 54px;padding:0}
.tiles div{background:var(--panel);border-radius:10px;padding:14px 16px 12px;display:grid;
  grid-template-rows:subgrid;grid-row:span 3;row-gap:0;align-content:start}
.tiles dt{color:var(--soft);font-size:13px} .tiles dd{margin:0}
.tiles .value{font-size:23px;line-height:1.25;font-weight:650;letter-spacing:-.015em;
  margin:3px 0 2px}
.tiles .words{font-size:18px;line-height:1.25;align-self:end}
.tiles .note{color:var(--soft);font-size:13px} .scroll{overflow-x:auto}
table{border-collapse:collapse;width:auto;min-width:62%;font-size:14px;margin:4px 0 8px}
caption{text-align:left;color:var(--soft);padding:0 0 6px;font-size:14px}
th,td{text-align:left;padding:7px 22px 7px 0;border-bottom:1px solid var(--line);
  vertical-align:top}
thead th{color:var(--soft);font-weight:500;font-size:13px;border-bottom-color:var(--soft)}
tbody th{font-weight:500;min-width:11em} td.n,th.n{text-align:right;white-space:nowrap}
td:last-child,th:last-child{padding-right:0} td,dd{overflow-wrap:anywhere}
.heat{width:auto;min-width:62%}
.heat td{text-align:right;padding:8px 12px;border:0;white-space:nowrap;
  background:color-mix(in srgb,var(--accent) var(--mix,0%),transparent)}
.heat th{border:0;padding-left:12px} .heat thead th{text-align:right}
.heat thead th:first-child{text-align:left}
.heat .chosen{outline:2px solid var(--ink);outline-offset:-2px}
small{font-size:12px;color:inherit}
pre{background:var(--panel);border-radius:8px;padding:14px 18px;overflow-x:auto;
  font:13px/1.6 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;margin:0 0 12px;
  white-space:pre-wrap;overflow-wrap:anywhere}
code{font:.92em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.command{padding:8px 16px;margin:0;background:none;border:1px solid var(--line)}
.copyable{position:relative} .copyable pre{padding-right:76px}
.copyable button{position:absolute;right:6px;top:5px}
button{font:inherit;font-size:13px;color:var(--ink);background:var(--paper);
  border:1px solid var(--line);border-radius:6px;padding:3px 12px;cursor:pointer}
button:hover{border-color:var(--accent)} .js-only{display:none} .js .js-only{display:block}
.js button.js-only{display:inline-block}
.chart{display:block;width:100%;height:auto;overflow:visible;margin:8px 0 12px;font-size:13px}
.chart text,.legend{fill:var(--soft);color:var(--soft)} .chart .on{fill:#fff;font-weight:600}
.chart .on.stall,.chart .on.slowdown{fill:#1a1f26}
.chart .on.other{fill:light-dark(#1a1f26,#fff)}
.legend li{display:flex;align-items:center;gap:7px} .legend{margin-bottom:12px}
.legend b{color:var(--ink);font-weight:600}
.key{width:12px;height:12px;border-radius:3px;display:inline-block}
.grid,.axis{stroke:var(--line);stroke-width:1} .curve{fill:none;stroke-width:2.5}
.curve.memory{stroke:var(--memory)} .curve.disk{stroke:var(--disk);stroke-dasharray:7 4}
.here{fill:var(--paper);stroke:var(--ink);stroke-width:3} .here.memory{stroke:var(--memory)}
.here.disk{stroke:var(--disk)} .best{stroke:var(--ink);stroke-width:3}
.best.memory{stroke:var(--memory)} .best.disk{stroke:var(--disk)} .part{rx:3px}
.productive{fill:var(--c-productive);background:var(--c-productive)}
.stall{fill:var(--c-stall);background:var(--c-stall)}
.slowdown{fill:var(--c-slowdown);background:var(--c-slowdown)}
.lost{fill:var(--c-lost);background:var(--c-lost)}
.down{fill:var(--c-down);background:var(--c-down)}
.other{fill:var(--c-other);background:var(--c-other)} .glass{fill:var(--panel)}
.g-train{fill:var(--c-train);background:var(--c-train)}
.g-copy,.g-moved{fill:var(--c-copy);background:var(--c-copy)}
.g-window{fill:var(--c-train);background:var(--c-train)}
.g-beside{fill:var(--c-lost);background:var(--c-lost)}
.g-persist{fill:var(--c-persist);background:var(--c-persist)}
.g-lost{fill:var(--c-lost);background:var(--c-lost)}
.g-down{fill:var(--c-down);background:var(--c-down)} .mark{stroke:var(--bad);stroke-width:1.5}
.mark.plan{stroke:var(--soft);stroke-dasharray:3 3} .mark.degraded{stroke:var(--warn)}
.sign,.chart text.sign{fill:var(--bad);color:var(--bad);font-style:normal;font-weight:700;
  background:none}
.sign.plan,.chart text.sign.plan{fill:var(--soft);color:var(--soft)}
.sign.degraded,.chart text.sign.degraded{fill:var(--warn);color:var(--warn)}
.track{fill:var(--panel);stroke:var(--line)} .used{fill:var(--c-other)}
.ours{fill:var(--c-productive)} .ours.over{fill:var(--bad)}
.limit{stroke:var(--bad);stroke-width:2.5} .bin{fill:var(--c-productive)}
.quantile{stroke:var(--soft);stroke-dasharray:3 3}
.violin{fill:color-mix(in srgb,var(--accent) 34%,transparent);stroke:var(--accent)}
.whisker{fill:var(--ink);stroke:var(--ink)} .legend .whisker{stroke-width:2.5}
.luck .here,.legend .here{stroke:var(--ink)} .luck text{fill:var(--ink)}
.best-so-far{fill:none;stroke:var(--soft);stroke-width:1.5}
.write{stroke:var(--paper);stroke-width:1} .write.seed{fill:var(--c-stall)}
.write.search{fill:var(--accent)} .write.final{fill:var(--good)}
.write.failed{fill:none;stroke:var(--bad);stroke-width:2}
.sliders{display:grid!important;grid-template-columns:repeat(auto-fit,minmax(205px,1fr));
  gap:12px 28px;margin:16px 0 18px}
html:not(.js) .sliders{display:none!important}
.sliders label{display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 8px;font-size:14px;
  color:var(--soft)}
.sliders output{color:var(--ink);font-weight:600}
.sliders input{width:100%;accent-color:var(--accent);margin:4px 0}
.status{font-size:18px;margin:14px 0 2px;max-width:none} .status b{font-weight:650}
.findings{padding:0;margin:0;list-style:none}
.findings>li{border-top:1px solid var(--line);padding:16px 0 12px;display:grid;
  grid-template-columns:92px 1fr auto;gap:2px 18px}
.findings h3{margin:0;font-size:16px} .findings p{margin:3px 0 0;grid-column:2}
.findings .save{text-align:right;font-weight:600;white-space:nowrap}
.findings .save span{display:block;font-weight:400;font-size:13px;color:var(--soft)}
.level{font-size:13px;font-weight:600;padding-top:2px} .level.high{color:var(--bad)}
.level.medium{color:var(--warn)} .level.low{color:var(--soft)} .ok,.no{white-space:nowrap}
.ok{color:var(--good)} .no{color:var(--bad)} .dim{color:var(--soft)} details{margin:8px 0 14px}
summary{cursor:pointer;color:var(--accent);font-size:14px;width:fit-content}
details>:not(summary){margin-top:10px} .add{color:var(--good)} .del{color:var(--bad)}
footer{border-top:1px solid var(--line);color:var(--soft);font-size:13px;padding:16px 0 44px}
@media(max-width:640px){.wrap{padding:0 16px}header.wrap{padding-top:24px}.verdict{
  padding:18px 18px 12px}.verdict h2{font-size:21px}.tiles{grid-template-columns:1fr 1fr}
  .findings>li{grid-template-columns:1fr}.findings p,.findings .save{grid-column:1;
  text-align:left}.chart.u-curve,.chart.gantt,.chart.memory,.chart.iterations,.chart.luck,.chart.search{
  min-width:640px}
  .chartbox{overflow-x:auto}.tiles .value{font-size:20px}.chart.bars text{display:none}}
@media(prefers-reduced-motion:reduce){html{scroll-behavior:auto}*{transition:none!important;
  animation:none!important}}
@media print{:root{color-scheme:light}body{font-size:11pt}.js-only,.sliders,nav,.skip{
  display:none!important}section,.findings>li,tr,figure,.tiles{break-inside:avoid}section{
  margin-bottom:26px}details::details-content{content-visibility:visible;display:block}summary{
  list-style:none}.wrap{max-width:none;padding:0}pre{white-space:pre-wrap}*{
  print-color-adjust:exact}}
"""

SCRIPT = """
"use strict";
document.documentElement.classList.add("js");
%(formulas)s
const three = n => String(Number(n.toPrecision(3)));
const duration = s => {
  if (s < 1e-3) return three(s * 1e6) + " us";
  if (s < 1) return three(s * 1e3) + " ms";
  if (s < 120) return three(s) + " s";
  const pair = (total, unit, smaller) => {
    const rest = total %% 60;
    return (total - rest) / 60 + " " + unit + (rest ? " " + rest + " " + smaller : "");
  };
  if (s < 7200) return pair(Math.round(s), "min", "s");
  if (s < 172800) return pair(Math.round(s / 60), "h", "min");
  return three(s / 86400) + " d";
};
const fraction = f => three(f * 100) + " %%";
const byId = id => document.getElementById(id);

for (const button of document.querySelectorAll("button[data-copy]")) {
  button.addEventListener("click", () => {
    const source = byId(button.dataset.copy), range = document.createRange();
    range.selectNodeContents(source);
    const selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    const done = () => { button.textContent = "copied"; };
    if (navigator.clipboard) navigator.clipboard.writeText(source.textContent).then(done, () => {});
    else if (document.execCommand("copy")) done();
  });
}
addEventListener("beforeprint", () => {
  for (const item of document.querySelectorAll("details")) item.open = true;
});

const box = byId("what-if-data") && JSON.parse(byId("what-if-data").textContent);
if (box) {
  const plan = box.point, now = {...plan}, times = {}, g = box.geometry;
  const scaled = () => {
    const point = {...now};
    for (const scale of Object.keys(times))
      for (const name of Object.keys(scales[scale]))
        point[name] *= times[scale] ** scales[scale][name];
    return point;
  };
  const inputs = [...document.querySelectorAll("input[data-name]")];
  const x = s => g.left + g.width * Math.log(max(s, g.low / 10) / g.low) / Math.log(g.high / g.low);
  const ticksTo = top => {
    const raw = top / 4, m = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].find(k => k * m >= raw * 0.999) * m;
    return Array.from({length: Math.floor(top / step * 1.0001) + 1}, (_, i) => i * step);
  };
  const show = input => {
    const unit = input.dataset.unit, name = input.dataset.name;
    const text = unit === "x" ? three(name in times ? times[name] : 1) + " x" :
      unit === "s" ? duration(now[name]) : fraction(now[name]);
    input.parentNode.querySelector("output").textContent = text;
    input.setAttribute("aria-valuetext", text);
  };
  const draw = () => {
    const at = scaled(), here = waste(at), curves = {};
    let least = Infinity;
    for (const tier of box.tiers) {
      curves[tier] = Array.from({length: g.samples + 1}, (_, i) => {
        const s = g.low * (g.high / g.low) ** (i / g.samples);
        const w = waste({...at, [tier + "_interval_s"]: s});
        least = min(least, w);
        return [s, w];
      });
    }
    const ticks = ticksTo(max(4 * least, 1.4 * here)), top = ticks[ticks.length - 1] || 1;
    const y = w => g.top + g.height * (1 - min(w / top, 3));
    byId("u-grid").innerHTML = ticks.map(t =>
      `<line x1="${g.left}" x2="${g.left + g.width}" y1="${y(t)}" y2="${y(t)}" class="grid"/>` +
      `<text x="${g.left - 10}" y="${y(t) + 4}" text-anchor="end">${fraction(t)}</text>`).join("");
    const best = [];
    for (const tier of box.tiers) {
      byId("curve-" + tier).setAttribute("d", "M" + curves[tier].map(
        ([s, w]) => x(s).toFixed(2) + " " + y(w).toFixed(2)).join("L"));
      byId("here-" + tier).setAttribute("cx", x(at[tier + "_interval_s"]));
      byId("here-" + tier).setAttribute("cy", y(here));
      const s = optimum[tier](at), base = g.top + g.height;
      byId("best-" + tier).setAttribute("d", `M${x(s)} ${base}V${base - 14}`);
      best.push(tier + " every " + duration(s));
    }
    byId("what-if-status").textContent = "Lost time " + fraction(here) + ", goodput " +
      fraction(max(0, 1 - here)) + ". Least loss here: " + best.join(", ") + ".";
    const parts = terms(at);
    for (const name of Object.keys(parts)) byId("term-" + name).textContent = fraction(parts[name]);
  };
  for (const input of inputs) {
    const low = Number(input.dataset.low), high = Number(input.dataset.high);
    const linear = input.dataset.scale === "linear";
    input.addEventListener("input", () => {
      const t = Number(input.value) / 1000, moved = input.dataset.unit === "x" ? times : now;
      moved[input.dataset.name] = linear ? low + (high - low) * t : low * (high / low) ** t;
      show(input);
      draw();
    });
    show(input);
  }
  byId("what-if-reset").addEventListener("click", () => {
    Object.assign(now, plan);
    for (const scale of Object.keys(times)) delete times[scale];
    for (const input of inputs) { input.value = input.defaultValue; show(input); }
    draw();
  });
}
"""


def script() -> str:
    """The page's one script, with the formulas of `what_if` in it."""
    return SCRIPT % {"formulas": what_if.javascript()}


def policy(code: str) -> str:
    """Content security policy: nothing from anywhere, this script only."""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


def page(*, title: str, header: Html, sections: Sequence[Html], footer: Html, data: Html) -> str:
    """The document around the sections."""
    code = script()
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("meta", http_equiv="Content-Security-Policy", content=Html(policy(code))),
        tag("title", title),
        tag("style", Html(CSS)),
    )
    body = tag(
        "body",
        tag("a", "Skip to the verdict", class_="skip", href="#main"),
        tag("header", header, class_="wrap"),
        tag("main", *sections, id="main", class_="wrap"),
        tag("footer", tag("div", footer, class_="wrap")),
        data,
        tag("script", Html(code)),
    )
    return f"<!doctype html>\n{tag('html', join(head, body), lang='en')}\n"
