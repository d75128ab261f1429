"use strict";
/* The parts that every view uses: unpacking, elements, colors, tabs, charts. No view builds HTML from text: names come
   from outside and are only ever set as text. */

const page = { data: null, views: [], redraw: new Map(), charts: new Map(), unpacked: new WeakMap(), kept: {}, picks: {} };

/* What the reader chose in a view; kept when the view is drawn again with newer data. */
function kept(view, defaults) {
  page.kept[view] ??= defaults;
  return page.kept[view];
}

/* ---- elements ------------------------------------------------------------------------------------------------- */

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function select(label, options, onchange, chosen = null) {
  const box = h("select", {}, ...options.map(([value, text]) => h("option", { value }, text)));
  if (chosen !== null) box.value = String(chosen);
  box.addEventListener("change", () => onchange(box.value));
  return h("label", {}, label, box);
}

function checkbox(label, checked, onchange) {
  const box = h("input", { type: "checkbox", checked });
  box.addEventListener("change", () => onchange(box.checked));
  return h("label", {}, box, label);
}

function escapeText(text) {
  return String(text).replace(/[&<>"']/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[c]);
}

/* ---- numbers -------------------------------------------------------------------------------------------------- */

/* Every metric of the page is in its table of metrics; shares and plain numbers are what is no metric. */
const PLAIN = { title: "", heading: "", unit: "", scale: 1, digits: null, better: null, on_samples: false };
const PERCENT = { ...PLAIN, unit: "%", scale: 100, digits: 2 };
const metricOf = (data, name) => data.metrics[name] ?? { ...PLAIN, title: name, heading: name };
const titled = (metric, split) => (metric.on_samples ? `${split} ${metric.title}` : metric.title);

function show(value, metric = PLAIN, signed = false) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const sign = signed && value > 0 ? "+" : "";
  if (metric.digits !== null) return sign + (metric.scale * value).toFixed(Math.min(1, metric.digits));
  return sign + Number((metric.scale * value).toPrecision(4)).toString();
}

/* A value on an axis, with its unit. */
const tick = (metric) => (v) => `${Number((metric.scale * v).toPrecision(6))}` + (metric.unit ? ` ${metric.unit}` : "");

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) { count /= 1000; unit += 1; }
  return `${Number(count.toPrecision(3))} ${units[unit]}`;
}

function mean(values) {
  const known = Array.from(values).filter(Number.isFinite);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : NaN;
}

/* How people call a client: by its name, else "client 7". A name that is written from right to left is kept apart from the
   text around it. */
const named = (data, id) => Boolean(data.names?.[id]);
const clientName = (data, id) => (!named(data, id) ? `client ${id}`
  : /[\u0590-\u08ff\ufb1d-\ufefc]/.test(data.names[id]) ? `\u2068${data.names[id]}\u2069` : data.names[id]);
/* A text that is cut with an ellipsis where it has no room; what shows it has the whole text in its tooltip. */
function brief(text, most = 20) {
  const signs = Array.from(text);
  return signs.length <= most ? text : `${signs.slice(0, most - 1).join("").trimEnd()}…`;
}
/* A client's name, cut; with its id where the names of several clients are then the same. */
function briefClient(data, id, most) {
  page.briefs ??= new WeakMap();
  if (!page.briefs.has(data)) page.briefs.set(data, new Map());
  const known = page.briefs.get(data);
  if (!known.has(most)) {
    const counts = new Map();
    data.cluster.forEach((_, i) => { const text = brief(clientName(data, i), most); counts.set(text, (counts.get(text) ?? 0) + 1); });
    known.set(most, counts);
  }
  const text = brief(clientName(data, id), most);
  const mark = ` (${id})`;
  return known.get(most).get(text) > 1 ? brief(clientName(data, id), most - mark.length) + mark : text;
}

/* The planted clusters that views show one by one: all, or none where they are too many (MOST_CLUSTERS of planted.py). */
const MOST_CLUSTERS = 50;
const listed = (data) => (data.clusters.length > MOST_CLUSTERS ? [] : data.clusters);

/* The clients that arrays of one entry a client are of: all, or a sample of a large population. */
const shownClients = (data) => data.clients.shown ?? data.cluster.map((_, i) => i);
const sampleNote = (data) => (data.clients.shown
  ? h("p", { class: "note" }, `Of ${data.cluster.length} clients a sample of ${data.clients.shown.length} is shown, in equal steps${data.clusters.length ? " through the planted clusters" : ""}; the parquet files hold all.`) : null);

async function unpack(packed) {
  if (page.unpacked.has(packed)) return page.unpacked.get(packed);
  const raw = Uint8Array.from(atob(packed.text), (c) => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  let values;
  if (packed.kind === "u8") values = new Uint8Array(buffer);
  else if (packed.kind === "f32") values = new Float32Array(buffer);
  else values = new Uint16Array(buffer);
  if (packed.kind === "q16") {
    values = Float64Array.from(values, (whole) => (whole === 65535 ? NaN : packed.low + whole * packed.step));
  }
  const array = { values, shape: packed.shape };
  page.unpacked.set(packed, array);
  return array;
}

/* ---- colors: each stands out from its page by 3 to 1 or more and can be told from the others with any kind of color
   blindness (a test computes both); each also has a dash or a mark of its own, for a copy in gray ------------------- */

const METHOD_COLORS = ["#004885", "#895200", "#0DA066", "#BA6FCC", "#D96A05", "#006B9C", "#623902", "#625A5E"];
const METHOD_COLORS_DARK = ["#187BAE", "#BC590C", "#65FFB4", "#C3ADDC", "#EAB43C", "#BCDDFC", "#B99857", "#878A8A"];
const CLUSTER_COLORS = ["#5270CC", "#BC3577", "#395D00", "#9C8E0E", "#1098BC", "#981472", "#81710A", "#533D40"];
const CLUSTER_COLORS_DARK = ["#6AA1FB", "#FF8D92", "#018625", "#FADD60", "#68CFF0", "#D35B9F", "#B89936", "#CDEAEA"];
const DASHES = ["solid", "dashed", "dotted", [8, 3, 2, 3], [2, 5], [12, 4], [5, 2, 2, 2, 2, 2], [1, 2]];
const MARKS = ["circle", "rect", "triangle", "diamond", "path://M0,0 L10,0 L5,9 Z",
  "path://M3,0 L7,0 L7,3 L10,3 L10,7 L7,7 L7,10 L3,10 L3,7 L0,7 L0,3 L3,3 Z",
  "path://M5,0 L6.2,3.4 L10,3.5 L7,5.8 L8,9.5 L5,7.4 L2,9.5 L3,5.8 L0,3.5 L3.8,3.4 Z",
  "path://M2,0 L5,3 L8,0 L10,2 L7,5 L10,8 L8,10 L5,7 L2,10 L0,8 L3,5 L0,2 Z"];

const GLYPHS = ["●", "■", "▲", "◆", "▼", "✚", "★", "✖"]; // the marks, for text

const isDark = () => document.documentElement.dataset.theme === "dark";
const methodColor = (place) => (isDark() ? METHOD_COLORS_DARK : METHOD_COLORS)[place % METHOD_COLORS.length];
const turn = (place) => (place + Math.floor(place / 8)) % 8; // so that 64 differ in color or in dash and mark
const methodDash = (place) => DASHES[turn(place)];
const markOf = (place) => MARKS[turn(Math.max(0, place))];
const clusterColor = (place) => (place < 0 ? "#808080" : (isDark() ? CLUSTER_COLORS_DARK : CLUSTER_COLORS)[place % CLUSTER_COLORS.length]);
const clusterGlyph = (place) => h("span", { class: "glyph", "aria-hidden": "true",
  style: `color:${place < 0 ? "var(--muted)" : `var(--cluster-${place % CLUSTER_COLORS.length})`}` }, GLYPHS[turn(Math.max(0, place))]);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/* Both ramps change steadily in lightness, so they survive a copy in gray; nothing is the color of the page. */
const RAMPS = {
  light: [[255, 255, 255], [255, 237, 160], [254, 178, 76], [240, 89, 35], [166, 15, 45], [73, 0, 36]],
  dark: [[20, 24, 31], [62, 20, 90], [140, 41, 99], [215, 75, 60], [249, 155, 45], [252, 245, 170]],
};

function ramp(share) {
  const stops = RAMPS[isDark() ? "dark" : "light"];
  const at = Math.min(1, Math.max(0, share)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(at));
  return stops[low].map((c, i) => Math.round(c + (at - low) * (stops[low + 1][i] - c)));
}

/* ---- charts --------------------------------------------------------------------------------------------------- */

function chart(container, { height = 340, caption = "", alt, option, click = null }) {
  const box = h("div", { class: "chart", style: `height:${height}px`, role: "img", "aria-label": alt });
  const legend = h("div", { class: "legend", role: "group", "aria-label": "Shown in the chart" });
  container.append(h("figure", {}, legend, box, caption ? h("figcaption", {}, caption) : null));
  const drawn = echarts.init(box, null, { renderer: "canvas" });
  const hidden = new Set();
  function draw() {
    const whole = { animation: false, ...base(), ...option() };
    const named = new Map();
    for (const series of whole.series ?? []) if (series.name && !named.has(series.name)) named.set(series.name, series);
    const selected = Object.fromEntries([...named.keys()].map((name) => [name, !hidden.has(name)]));
    drawn.setOption({ ...whole, legend: { show: false, selected } }, { notMerge: true });
    legend.hidden = named.size < 2;
    const entries = [...named.values()].map((series) => entry(series));
    if (entries.some((button, i) => button !== legend.children[i]) || legend.children.length > entries.length) {
      legend.replaceChildren(...entries);
    }
  }
  /* One button a name for as long as the chart lives: a chart drawn again must not take the keyboard's focus away. */
  const buttons = new Map();
  function entry(series) {
    const { name } = series;
    if (!buttons.has(name)) {
      const added = h("button", { type: "button", "aria-pressed": String(!hidden.has(name)) });
      added.addEventListener("click", () => {
        if (!hidden.delete(name)) hidden.add(name);
        added.setAttribute("aria-pressed", String(!hidden.has(name)));
        drawn.dispatchAction({ type: "legendToggleSelect", name });
      });
      buttons.set(name, added);
    }
    const button = buttons.get(name);
    button.replaceChildren(sample(series), name);
    return button;
  }
  draw();
  if (click) drawn.on("click", click);
  zoomable(box, drawn);
  let width = box.clientWidth;
  const observer = new ResizeObserver(() => {
    drawn.resize();
    if (box.clientWidth !== width) { width = box.clientWidth; draw(); }
  });
  observer.observe(box);
  page.charts.set(box, { drawn, draw, observer });
  return { draw, box, drawn };
}

/* The line or the mark of a series, for its legend. */
function sample(series) {
  const color = series.itemStyle.color;
  const isLine = series.type === "line";
  const width = isLine ? 34 : 14;
  const svg = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const picture = svg("svg", { width, height: 12, viewBox: `0 0 ${width} 12`, "aria-hidden": "true" });
  if (isLine) {
    const type = series.lineStyle.type;
    const dash = { solid: "none", dashed: "8 4", dotted: "2 2" }[type] ?? type.join(" ");
    picture.append(svg("line", { x1: 0, x2: width, y1: 6, y2: 6, stroke: color, "stroke-width": 2, "stroke-dasharray": dash }));
  }
  if (!isLine || series.showSymbol) {
    const shapes = { circle: "M0,5 a5,5 0 1,0 10,0 a5,5 0 1,0 -10,0 Z", rect: "M0,0 H10 V10 H0 Z", triangle: "M5,0 L10,10 L0,10 Z", diamond: "M5,0 L10,5 L5,10 L0,5 Z" };
    const path = shapes[series.symbol] ?? String(series.symbol).replace("path://", "");
    const flat = Array.isArray(series.symbolSize) ? " scale(1,0.3) translate(0,12)" : "";
    picture.append(svg("path", { d: path, fill: color, transform: `translate(${width / 2 - 5},1)${flat}` }));
  }
  return picture;
}

/* Zooming and moving by keyboard, in a chart that the mouse can zoom: + and -, arrows, 0 for the whole. */
function zoomable(box, drawn) {
  const { dataZoom, series } = drawn.getOption();
  const isGraph = Boolean(series?.[0]?.roam);
  if (!isGraph && !dataZoom?.length) return;
  box.tabIndex = 0;
  box.setAttribute("aria-keyshortcuts", "+ - 0 ArrowLeft ArrowRight");
  box.addEventListener("keydown", (event) => {
    const key = event.key === "=" ? "+" : event.key;
    const [across, down] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key] ?? [0, 0];
    if (!["+", "-", "0"].includes(key) && !across && !(down && isGraph)) return;
    event.preventDefault();
    const factor = { "+": 1.25, "-": 0.8 }[key] ?? 1;
    if (isGraph) {
      const { zoom = 1, center } = drawn.getOption().series[0];
      const middle = (center ?? []).map((v) => (typeof v === "string" ? parseFloat(v) : 50));
      const to = [0, 1].map((i) => `${(middle[i] ?? 50) + 10 * [across, down][i] / zoom}%`);
      drawn.setOption({ series: [key === "0" ? { zoom: 1, center: ["50%", "50%"] } : { zoom: zoom * factor, center: to }] });
      return;
    }
    const { start, end } = drawn.getOption().dataZoom[0];
    const size = key === "0" ? 100 : Math.min(100, (end - start) / factor);
    const from = Math.min(100 - size, Math.max(0, (start + end - size) / 2 + 0.2 * size * across));
    drawn.dispatchAction({ type: "dataZoom", start: from, end: from + size });
  });
}

function base() {
  return {
    textStyle: { color: css("--text"), fontFamily: getComputedStyle(document.body).fontFamily },
    grid: { left: 60, right: 24, top: 16, bottom: 48 },
    tooltip: { ...tooltipStyle(), trigger: "axis", renderMode: "html" },
  };
}

function tooltipStyle() {
  return {
    backgroundColor: css("--raised"), borderColor: css("--line"), textStyle: { color: css("--text"), fontSize: 13 }, confine: true,
    extraCssText: "max-width: 34em; white-space: normal; overflow-wrap: anywhere",
  };
}

function axis(name, extra = {}) {
  return {
    name, nameLocation: "middle", nameGap: 30, nameTextStyle: { color: css("--muted") },
    axisLabel: { color: css("--muted") }, axisLine: { onZero: false, lineStyle: { color: css("--line") } },
    splitLine: { lineStyle: { color: css("--line"), opacity: 0.6 } }, ...extra,
  };
}

function forget(root) {
  for (const element of page.redraw.keys()) if (root.contains(element)) page.redraw.delete(element);
  for (const [box, { drawn, observer }] of page.charts) {
    if (!root.contains(box)) continue;
    observer.disconnect();
    drawn.dispose();
    page.charts.delete(box);
  }
}

/* A line with a band from low to high around it; points are [x, mean, deviation]. */
function banded(name, points, color, dash, bands) {
  const line = {
    name, type: "line", symbol: points.length > 1 ? "none" : "circle", data: points.map(([x, y]) => [x, Number.isFinite(y) ? y : null]),
    lineStyle: { color: color, width: 2, type: dash }, itemStyle: { color: color }, emphasis: { focus: "series" }, z: 3,
  };
  const known = points.filter(([, y, s]) => Number.isFinite(y) && Number.isFinite(s));
  if (!bands || !known.some(([, , s]) => s > 0)) return [line];
  const outline = [...known.map(([x, y, s]) => [x, y + s]), ...[...known].reverse().map(([x, y, s]) => [x, y - s])];
  const band = {
    name, type: "custom", silent: true, tooltip: { show: false }, clip: true, z: 1,
    data: known.map(([x, y, s]) => [x, y - s, y + s]), encode: { x: 0, y: [1, 2] }, // so that the axis makes room for it
    renderItem: ({ dataIndex }, api) => (dataIndex ? null : {
      type: "polygon", shape: { points: outline.map((point) => api.coord(point)) }, style: { fill: color, opacity: 0.16 },
    }),
  };
  return [line, band]; // the legend takes its looks from the first
}

function axisTooltip(metric, xname) {
  return (entries) => {
    const lines = entries.filter((e) => e.seriesType === "line" && e.value && e.value[1] !== null).map((e) =>
      `<span class="swatch" style="background:${e.color}"></span>${escapeText(e.seriesName)}: <b>${show(e.value[1], metric)}</b>`);
    return lines.length ? `${xname} ${show(entries[0].value[0])}<br>${lines.join("<br>")}` : "";
  };
}

/* ---- a table that sorts by its columns -------------------------------------------------------------------------- */

function sortable(columns, rows, { onpick = null, label = "" } = {}) {
  const body = h("tbody");
  const sorting = kept(`table ${label}`, { by: -1, up: true });
  let { by, up } = sorting;
  const order = rows.map((_, i) => i);
  const heads = columns.map((column, i) => h("th", { scope: "col", class: column.text ? "text" : null },
    h("button", { type: "button", onclick: () => { up = by === i ? !up : column.text === true; by = i; Object.assign(sorting, { by, up }); fill(); } }, column.name)));
  function fill() {
    const sign = up ? 1 : -1;
    if (by >= 0) order.sort((a, b) => {
      const [x, y] = [rows[a].cells[by], rows[b].cells[by]];
      if (typeof x === "string") return sign * x.localeCompare(y, undefined, { numeric: true });
      if (Number.isFinite(x) && Number.isFinite(y)) return sign * (x - y);
      return Number.isFinite(y) - Number.isFinite(x);
    });
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== by ? "none" : up ? "ascending" : "descending"));
    body.replaceChildren(...order.map((i) => rows[i].element));
  }
  for (const row of rows) {
    row.element = h("tr", onpick ? { class: "pick", tabindex: "0", "aria-selected": "false" } : {},
      ...row.cells.map((value, i) => h("td", { class: columns[i].text ? "text" : null, dir: columns[i].text ? "auto" : null, title: columns[i].text && value.length > 30 ? value : null }, columns[i].show ? columns[i].show(value) : String(value))));
    if (!onpick) continue;
    row.element.addEventListener("click", () => onpick(row));
    row.element.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); onpick(row); }
    });
  }
  fill();
  return h("table", { "aria-label": label }, h("thead", {}, h("tr", {}, ...heads)), body);
}
