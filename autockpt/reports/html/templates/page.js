"use strict";
document.documentElement.classList.add("js");
/* formulas */
const three = n => String(Number(n.toPrecision(3)));
const duration = s => {
  if (s < 1e-3) return three(s * 1e6) + " us";
  if (s < 1) return three(s * 1e3) + " ms";
  if (s < 120) return three(s) + " s";
  const pair = (total, unit, smaller) => {
    const rest = total % 60;
    return (total - rest) / 60 + " " + unit + (rest ? " " + rest + " " + smaller : "");
  };
  if (s < 7200) return pair(Math.round(s), "min", "s");
  if (s < 172800) return pair(Math.round(s / 60), "h", "min");
  return three(s / 86400) + " d";
};
const fraction = f => {
  let text = three(f * 100), digits = 1;
  for (; f < 1 && Number(text) >= 100 && digits < 7; digits++) text = (f * 100).toFixed(digits);
  return text + " %";
};
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
