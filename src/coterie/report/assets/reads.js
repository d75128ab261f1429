/* Which models each client used: a heatmap per method with a slider over rounds, the within-cluster share, discovery. */

/* A heatmap on a canvas of one pixel per cell, so that a thousand clients draw at once. Rows: clients; columns: peers. */
function heatmapOf(data, reads, title) {
  const side = Math.max(...reads.cell) + 1;
  const members = Array.from({ length: side }, () => []);
  reads.cell.forEach((cell, client) => members[cell].push(client));
  const canvas = h("canvas", { width: side, height: side, role: "img", tabindex: "0" });
  const readout = h("p", { class: "readout", "aria-live": "polite" }, " ");
  const apart = !data.clusters.length && data.names && side <= 30 && side === data.cluster.length; // then clients are named
  const sizes = apart ? members.map(([client]) => ({ name: briefClient(data, client, 30), whole: clientName(data, client), cells: 1 }))
    : listed(data).map((c) => ({ name: c.name, cells: members.filter((m) => data.cluster[m[0]] === c.id).length }));
  const unknown = side - sizes.reduce((total, c) => total + c.cells, 0); // a node knows its own clients' clusters alone
  if (sizes.length && unknown > 0) sizes.unshift({ name: "not known", cells: unknown });
  const fit = sizes.every((c) => (c.cells / side) * 38 >= c.name.length);
  const names = () => sizes.map((c, i) => h("span", { style: `flex:${c.cells} 1 0`, title: c.whole ?? c.name }, fit ? c.name : String(i)));
  const element = h("figure", {}, h("h3", {}, title), h("div", { class: "heat" },
    h("div", { class: "heat-rows", "aria-hidden": "true" }, ...names()), canvas,
    h("div", { class: "heat-columns", "aria-hidden": "true" }, ...names())),
  fit ? null : h("p", { class: "readout" }, sizes.map((c, i) => `${i}: ${c.name}`).join(", ")), readout);
  let shown = null, at = [0, 0];

  function say() {
    const [row, column] = at;
    const who = (cell) => (data.names ? "" : "client ") + members[cell].slice(0, 4).map((c) => (data.names ? clientName(data, c) : c)).join(", ") + (members[cell].length > 4 ? ", …" : "");
    const cluster = (cell) => listed(data).find((c) => c.id === data.cluster[members[cell][0]])?.name;
    const of = (cell) => `${who(cell)}${cluster(cell) ? ` (${cluster(cell)})` : ""}`;
    readout.textContent = `${of(row)} used the model of ${of(column)} ${shown[row * side + column]} times`;
  }
  canvas.addEventListener("mousemove", (event) => {
    const place = canvas.getBoundingClientRect();
    const clamp = (v) => Math.min(side - 1, Math.max(0, Math.floor(v * side)));
    at = [clamp((event.clientY - place.top) / place.height), clamp((event.clientX - place.left) / place.width)];
    say();
  });
  canvas.addEventListener("mouseleave", () => { readout.textContent = " "; });
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    at = at.map((v, i) => Math.min(side - 1, Math.max(0, v + move[i])));
    say();
  });

  return {
    element,
    draw(counts, top, alt) {
      shown = counts;
      const image = new ImageData(side, side);
      const table = Array.from({ length: 256 }, (_, i) => ramp(i / 255));
      for (let i = 0; i < counts.length; i += 1) {
        const color = table[top ? Math.min(255, Math.round(255 * Math.sqrt(counts[i] / top))) : 0];
        image.data.set([...color, 255], 4 * i);
      }
      canvas.getContext("2d").putImageData(image, 0, 0);
      canvas.setAttribute("aria-label", alt);
    },
  };
}

function readSentence(data, reads, one, sum, text) {
  const side = Math.sqrt(sum.length);
  const cellCluster = new Int32Array(side);
  reads.cell.forEach((cell, client) => { cellCluster[cell] = data.cluster[client]; });
  let inside = 0, total = 0;
  for (let c = 0; c < sum.length; c += 1) {
    total += sum[c];
    if (cellCluster[Math.floor(c / side)] === cellCluster[c % side]) inside += sum[c];
  }
  const share = total ? `${((100 * inside) / total).toFixed(1)} % of reads are within the planted clusters` : "no reads";
  return `Heatmap of ${data.methods[one.method].label}, ${text}${listed(data).length || !total ? `: ${share}` : ""}`;
}

/* The heatmap of a whole run. */
function drawWhole(map, data, one) {
  const { values, shape } = page.unpacked.get(one.counts);
  const sum = new Float64Array(shape[1] * shape[2]);
  values.forEach((count, i) => { sum[i % sum.length] += count; });
  map.draw(sum, sum.reduce((a, b) => Math.max(a, b), 0), readSentence(data, data.reads, one, sum, "the whole run"));
}

page.views.push({
  id: "reads",
  name: "Models used",
  ready: (data) => data.reads !== null,
  async draw(root, data) {
    const reads = data.reads;
    const side = Math.max(...reads.cell) + 1;
    const first = reads.ends.map((end, i) => (i ? reads.ends[i - 1] : 0));
    for (const one of reads.methods) for (const key of ["counts", "share", "share_std"]) await unpack(one[key]);
    const maps = reads.methods.map((one) => heatmapOf(data, reads, data.methods[one.method].label));
    const state = kept("reads", { frame: null, whole: true }); // null: the last one, also when more rounds come
    const frame = () => Math.min(state.frame ?? Infinity, reads.ends.length - 1);
    const when = h("output", { "aria-live": "polite" });
    const legend = h("span", { class: "scale" });
    const most = h("span");
    const slider = h("input", { type: "range", min: 0, max: reads.ends.length - 1, value: frame(), style: "width:260px",
      "aria-label": "rounds" });

    function counts(one) {
      const { values } = page.unpacked.get(one.counts);
      const sum = new Float64Array(side * side);
      for (let f = state.whole ? 0 : frame(); f <= frame(); f += 1) {
        const offset = f * side * side;
        for (let i = 0; i < sum.length; i += 1) sum[i] += values[offset + i];
      }
      return sum;
    }

    function redraw() {
      const all = reads.methods.map(counts);
      const top = Math.max(...all.map((sum) => sum.reduce((a, b) => Math.max(a, b), 0)));
      const from = state.whole ? 0 : first[frame()];
      const text = `rounds ${from} to ${reads.ends[frame()] - 1}`;
      when.textContent = text;
      slider.setAttribute("aria-valuetext", text);
      most.textContent = ` ${top} reads (square-root scale)`;
      legend.style.background = `linear-gradient(to right, ${[0, 0.2, 0.4, 0.6, 0.8, 1].map((s) => `rgb(${ramp(s)})`).join(",")})`;
      all.forEach((sum, i) => maps[i].draw(sum, top, readSentence(data, reads, reads.methods[i], sum, text)));
    }

    slider.addEventListener("input", () => { state.frame = Number(slider.value) === reads.ends.length - 1 ? null : Number(slider.value); redraw(); });
    root.append(h("h2", {}, "Which models each client used"), h("p", {}, "A row for each client, a column for each peer whose model it used (a read); " +
      (data.clusters.length ? `both in order of planted cluster. ${listed(data).length ? "Blocks on the diagonal are reads within a cluster." : ""}` : "both in the same order.")),
    h("div", { class: "controls" }, h("label", {}, "Up to", slider), when,
      checkbox("cumulative", state.whole, (on) => { state.whole = on; redraw(); }),
      h("span", { class: "muted" }, "0 ", legend, most)),
    h("div", { class: "grid", id: "heatmaps" }, ...maps.map((map) => map.element)));
    if (side < data.cluster.length) {
      root.append(h("p", { class: "note" }, `A cell holds up to ${Math.ceil(data.cluster.length / 240)} neighboring clients${listed(data).length ? " of one cluster" : ""}.`));
    }
    page.redraw.set(slider, redraw);
    redraw();
    if (reads.expected !== null) drawShare(root, data, reads);
    if (reads.expected !== null) drawDiscovery(root, data, reads);
  },
});

function drawShare(root, data, reads) {
  root.append(h("h2", {}, "Share of reads within the planted cluster"));
  const ends = reads.methods.map((one) => `${data.methods[one.method].label} ${show(page.unpacked.get(one.share).values.at(-1), PERCENT)} %`);
  // Of thousands of small clusters all shares are so small that an axis up to 1 shows nothing.
  const top = Math.max(reads.expected, ...reads.methods.flatMap((one) => [...page.unpacked.get(one.share).values].filter(Number.isFinite)));
  const small = top < 0.05;
  chart(root, {
    height: 330, alt: `Within-cluster share of reads over rounds; at the last round: ${ends.join(", ")}; expected for random peers ${show(reads.expected, PERCENT)} %`,
    caption: "Dashed gray: expectation for random peers. Bands: one standard deviation over seeds.",
    option: () => ({
      xAxis: axis("round", { type: "value", min: "dataMin", max: "dataMax", minInterval: 1, splitLine: { show: false } }),
      yAxis: axis("within-cluster share", { type: "value", min: 0, max: small ? null : 1, nameGap: 44,
        axisLabel: { color: css("--muted"), formatter: small ? (v) => `${show(100 * v)} %` : tick(PERCENT) } }),
      tooltip: { ...tooltipStyle(), trigger: "axis", formatter: axisTooltip(PERCENT, "round") },
      series: reads.methods.flatMap((one, i) => {
        const [m, s] = [page.unpacked.get(one.share).values, page.unpacked.get(one.share_std).values];
        const points = one.rounds.map((r, k) => [r, m[k], s[k]]);
        const series = banded(data.methods[one.method].label, points, methodColor(one.method), methodDash(one.method), true);
        if (i === 0) {
          series[0].markLine = { silent: true, symbol: "none", lineStyle: { color: css("--muted"), type: "dashed" },
            label: { show: false }, data: [{ yAxis: reads.expected }] };
        }
        return series;
      }),
    }),
  });
}

function drawDiscovery(root, data, reads) {
  root.append(h("h2", {}, "Rounds to discovery"));
  const label = (one) => data.methods[one.method].label;
  const median = (one) => (2 * one.found.length > one.asked ? one.found[Math.floor((one.asked - 1) / 2)] : NaN);
  const rows = reads.methods.map((one) => ({
    cells: [label(one), one.found.length / one.asked, median(one), one.agreement.ari, one.agreement.nmi, one.gini],
  }));
  const last = Math.max(...reads.ends) - 1;
  chart(root, {
    height: 280, alt: "Share of clients that have found their cluster by each round: " +
      reads.methods.map((one) => `${label(one)} ${show(one.found.length / one.asked, PERCENT)} % in the end`).join(", "),
    caption: "A client has found its cluster once the within-cluster share of its reads in the last five active rounds is 80 % of the way from random to the largest possible.",
    option: () => ({
      xAxis: axis("round", { type: "value", min: 0, max: last, minInterval: 1, splitLine: { show: false } }),
      yAxis: axis("share of clients", { type: "value", min: 0, max: 1, nameGap: 44,
        axisLabel: { color: css("--muted"), formatter: tick(PERCENT) } }),
      tooltip: { ...tooltipStyle(), trigger: "axis", formatter: axisTooltip(PERCENT, "round") },
      series: reads.methods.flatMap((one) => {
        const at = Array.from({ length: last + 1 }, (_, r) => [r, one.found.filter((f) => f <= r).length / one.asked, NaN]);
        return banded(label(one), at, methodColor(one.method), methodDash(one.method), false)
          .map((series) => ({ ...series, step: "end" }));
      }),
    }),
  });
  root.append(h("div", { class: "scroll" }, sortable([
    { name: "Method", text: true },
    { name: "found their cluster, %", show: (v) => show(v, PERCENT) },
    { name: "median round", show: (v) => show(v) },
    { name: "ARI of communities and planted clusters", show: (v) => v.toFixed(3) },
    { name: "NMI", show: (v) => v.toFixed(3) },
    { name: "Gini of times read", show: (v) => v.toFixed(3) },
  ], rows, { label: "Discovery and communities per method" })));
}
