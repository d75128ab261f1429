/* Methods compared in pairs: a forest plot that is a table, what is established in words, and each client's difference. */

const FOREST = 260; // width of the intervals, in pixels

/* A step of 1, 2 or 5 times a power of ten, so that there are about four from low to high. */
function niceStep(low, high) {
  const rough = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5, 10].find((k) => k * power >= rough) ?? 10);
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/* The interval of a pair, on the scale of all; a filled square where it is established, else a hollow circle. */
function forest(pair, to) {
  const picture = svg("svg", { class: `forest${pair.established ? " sure" : ""}`, width: FOREST, height: 22, viewBox: `0 0 ${FOREST} 22`, "aria-hidden": "true" });
  picture.append(svg("line", { class: "zero", x1: to(0), x2: to(0), y1: 0, y2: 22 }));
  if (pair.difference === null) return picture;
  if (pair.low !== null) {
    const [low, high] = [to(pair.low), to(pair.high)];
    picture.append(svg("path", { class: "interval", d: `M${low},11 H${high} M${low},6 V16 M${high},6 V16` }));
  }
  const x = to(pair.difference);
  picture.append(pair.established ? svg("rect", { class: "mean", x: x - 5, y: 6, width: 10, height: 10 })
    : svg("circle", { class: "mean", cx: x, cy: 11, r: 4.5 }));
  return picture;
}

/* The scale over the intervals. */
function forestAxis(low, high, to, metric) {
  const picture = svg("svg", { class: "forest", width: FOREST, height: 18, viewBox: `0 0 ${FOREST} 18`, "aria-hidden": "true" });
  const scale = metric.scale;
  const step = niceStep(low * scale, high * scale);
  for (let k = Math.ceil((low * scale) / step - 1e-9); k * step <= high * scale + 1e-9 * step; k += 1) {
    const at = Number((k * step).toPrecision(6));
    const x = Math.min(FOREST - 14, Math.max(14, to(at / scale)));
    picture.append(svg("text", { x, y: 12, "text-anchor": "middle" }, `${at > 0 ? "+" : ""}${at}`));
  }
  return picture;
}

const pValue = (p) => (p === null ? "–" : p < 0.001 ? "<0.001" : p.toFixed(3));

page.views.push({
  id: "pairs",
  name: "Pairs",
  ready: (data) => Boolean(data.pairs?.families.length),
  async draw(root, data) {
    const { families, tables, about } = data.pairs;
    await unpack(data.clients.final);
    const main = Math.max(0, families.findIndex((one) => one.metric === data.metric && one.cluster === "all"));
    const state = kept("pairs", { family: main, method: "", pair: null });
    state.family = Math.min(state.family, families.length - 1);
    const over = { all: "all clients", clusters: "clusters, equal weight" };
    const heading = (one) => `${titled(metricOf(data, one.metric), "test")}, ${over[one.cluster] ?? one.cluster}`;
    const box = h("div"), detail = h("div", { id: "pair-detail", tabindex: "-1" });
    const labels = data.methods.map((m) => m.label);

    function pick(pair, scroll = true) {
      state.pair = [pair.method_a, pair.method_b];
      for (const row of box.querySelectorAll("tr.pick")) row.setAttribute("aria-selected", String(row.pair === pair));
      drawPair(detail, data, pair);
      history.replaceState(null, "", `#pair=${state.pair.map(encodeURIComponent).join(",")}`);
      if (scroll) detail.scrollIntoView({ block: "nearest" });
    }

    function redraw() {
      forget(detail);
      detail.replaceChildren();
      const family = families[state.family];
      const metric = metricOf(data, family.metric);
      const shown = family.pairs.filter((pair) => !state.method || pair.method_a === state.method || pair.method_b === state.method);
      const ends = shown.flatMap((pair) => [pair.difference, pair.low, pair.high]).filter((v) => v !== null);
      const low = Math.min(0, ...ends), high = Math.max(0, ...ends);
      const room = 0.06 * (high - low || 1);
      const to = (v) => (FOREST * (v - low + room)) / (high - low + 2 * room);
      const rows = shown.map((pair) => {
        const [mean, interval] = pair.text;
        const row = h("tr", { class: "pick", tabindex: "0", "aria-selected": "false" },
          h("th", { scope: "row", dir: "auto" }, `${pair.method_a} over ${pair.method_b}`),
          h("td", { class: pair.established ? "best" : null }, mean, interval ? h("small", {}, ` (${interval})`) : null), h("td", {}, forest(pair, to)),
          h("td", {}, pair.established ? "yes" : "no"), h("td", {}, pValue(pair.p_corrected)),
          h("td", {}, pair.effect === null ? "–" : pair.effect.toFixed(2)),
          h("td", {}, pair.gained === null ? "–" : `${Math.round(100 * pair.gained)} %`),
          h("td", {}, pair.seeds_needed ?? (pair.effect === null ? "–" : "over 1,000")));
        row.pair = pair;
        row.addEventListener("click", () => pick(pair));
        row.addEventListener("keydown", (event) => {
          if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(pair); }
        });
        return row;
      });
      const tested = family.pairs.filter((pair) => pair.p !== null).length;
      const head = ["Pair", "better by", null, "established", "p", "effect", "clients that gained", "seeds needed"];
      box.replaceChildren(family.standing ? h("p", { class: "standing" }, family.standing) : "", h("div", { class: "scroll" }, h("table", { class: "pairs" },
        h("caption", {}, `${metric.heading ? metric.heading[0].toUpperCase() + metric.heading.slice(1) : metric.title}: by how much the first method of a pair is better than the second, with 95 % intervals over ${shown[0]?.seeds ?? 0} seeds. ` +
          `${tested > 1 ? `p is corrected for ${tested} pairs. ` : ""}Effect: the difference in standard deviations over seeds. Seeds needed: to establish a difference of this size, with 80 % power. Choose a row for its clients.`),
        h("thead", {}, h("tr", {}, ...head.map((text) => h("th", { scope: "col" }, text ?? forestAxis(low - room, high + room, to, metric))))),
        h("tbody", {}, ...rows))));
      const chosen = state.pair && rows.find((row) => state.pair.includes(row.pair.method_a) && state.pair.includes(row.pair.method_b));
      if (chosen) pick(chosen.pair, false);
    }

    const filter = select("Pairs of", [["", "all methods"], ...labels.map((label) => [label, label])], (v) => { state.method = v; redraw(); }, state.method);
    page.picks.method = (label) => {
      if (!labels.includes(label)) return false;
      state.method = label;
      state.pair = null;
      filter.querySelector("select").value = label;
      redraw();
      return true;
    };
    page.picks.pair = (a, b) => {
      const found = families[state.family].pairs.find((pair) => [a, b].includes(pair.method_a) && [a, b].includes(pair.method_b) && a !== b);
      if (!found) return false;
      Object.assign(state, { method: "", pair: [a, b] });
      filter.querySelector("select").value = "";
      redraw();
      detail.scrollIntoView({ block: "nearest" });
      return true;
    };
    root.append(h("h2", {}, "Methods in pairs"), h("div", { class: "controls" },
      select("Of", families.map((one, i) => [i, heading(one)]), (v) => { state.family = Number(v); redraw(); }, state.family), filter), box, detail,
    about ? h("p", { class: "note" }, about) : "",
    ...Object.entries(tables).map(([name, text]) => {
      const pre = h("pre", {}, text);
      return h("details", {}, h("summary", {}, `Tables as ${name}`), h("p", {}, h("button", { type: "button", onclick: (event) => copy(pre, event.target) }, "Copy")), pre);
    }));
    redraw();
  },
});

/* Copy what an element says; also from a page that was opened from disk, where browsers have no other way. */
function copy(element, button) {
  const range = document.createRange();
  range.selectNodeContents(element);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
  button.textContent = document.execCommand("copy") ? "Copied" : "Selected: copy it with the keyboard";
}

/* What is established about a pair, and by how much each client does better; the latter of the main metric alone. */
function drawPair(root, data, pair) {
  forget(root);
  root.replaceChildren(h("h3", {}, `${pair.method_a} over ${pair.method_b}`), h("p", { class: "verdict" }, `${pair.verdict}.`));
  const ids = shownClients(data);
  const [a, b] = [pair.method_a, pair.method_b].map((label) => data.methods.findIndex((m) => m.label === label));
  if (pair.metric !== data.metric || a < 0 || b < 0 || ids.length < 2) return;
  const metric = metricOf(data, data.metric);
  const sign = metric.better === "lower" ? -1 : 1;
  const { values } = page.unpacked.get(data.clients.final);
  const rows = ids.map((client, place) => ({ client, value: sign * (values[a * ids.length + place] - values[b * ids.length + place]) }))
    .filter((row) => Number.isFinite(row.value)).sort((x, y) => y.value - x.value);
  const gained = rows.filter((row) => row.value > 0).length;
  const place = h("div");
  root.append(place);
  chart(place, {
    height: 220,
    alt: `By how much each client does better under ${pair.method_a} than under ${pair.method_b}, mean over seeds: ${gained} of ${rows.length} clients gain, from ${show(rows.at(-1)?.value, metric, true)} to ${show(rows[0]?.value, metric, true)}`,
    caption: `Each client's difference, mean over seeds, in order of size: ${gained} of ${rows.length} do better under ${pair.method_a}.`,
    option: () => ({
      grid: { left: 60, right: 20, top: 12, bottom: 34 },
      xAxis: axis("clients", { type: "category", data: rows.map((row) => clientName(data, row.client)), axisLabel: { show: false }, axisTick: { show: false }, nameGap: 12, splitLine: { show: false } }),
      yAxis: axis(`better by${metric.unit ? `, ${metric.unit}` : ""}`, { type: "value", nameGap: 44, axisLabel: { color: css("--muted"), formatter: (v) => `${Number((metric.scale * v).toPrecision(3))}` } }),
      tooltip: { ...tooltipStyle(), trigger: "axis", axisPointer: { type: "shadow" }, formatter: ([e]) => `${escapeText(clientName(data, rows[e.dataIndex].client))}: <b>${show(e.value, metric, true)}</b>` },
      series: [{ type: "bar", data: rows.map((row) => row.value), itemStyle: { color: css("--accent") }, barMaxWidth: 26 }],
    }),
  });
}
